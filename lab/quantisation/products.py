"""Time products of a few tokens with one matrix, plain and quantised, on the first device of JAX.

To use one core of a CPU, as each device of an engine does: `taskset -c 0 python -m lab products`.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp

from orca_jax.helpers.reporting import hardware
from orca_jax.kernels.matmul import matmul, quantised_matmul
from orca_jax.model.matrices.quantise import quantise
from orca_jax.values.config import Quantization
from orca_jax.values.errors import ConfigError

TOKENS = (1, 8, 32, 128)
KINDS = get_args(Quantization)


def run(args: argparse.Namespace) -> None:
    """Time all products in turn, as often as there are passes; print a table and a line of JSON.

    Raises:
        ConfigError: a flag is wrong.
    """
    for name in ("inputs", "outputs", "passes"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} must be at least 1", param=name)
    load_before = os.getloadavg()[0]
    programs = _programs(args.inputs, args.outputs)
    milliseconds = {}
    print(f"{'tokens':>8}" + "".join(f"{name:>10}" for name in programs) + "   milliseconds")
    for tokens in TOKENS:
        x = jax.random.normal(jax.random.key(1), (tokens, args.inputs))
        for program in programs.values():
            program(x).block_until_ready()
        best = dict.fromkeys(programs, float("inf"))
        for _ in range(args.passes):
            for name, program in programs.items():
                start = time.perf_counter()
                program(x).block_until_ready()
                best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
        milliseconds[tokens] = best
        print(f"{tokens:>8}" + "".join(f"{value:>10.2f}" for value in best.values()))
    loads = [load_before, os.getloadavg()[0]]
    config = {name: getattr(args, name) for name in ("inputs", "outputs", "passes")}
    line = {
        "milliseconds": milliseconds,
        "load_average": loads,
        "hardware": hardware(),
        "config": config,
    }
    print(json.dumps(line))


def _programs(inputs: int, outputs: int) -> dict[str, Callable[[jax.Array], jax.Array]]:
    """The product with the same matrix in each form, by its name."""
    weight = jax.random.normal(jax.random.key(0), (inputs, outputs))
    programs: dict[str, Callable[[jax.Array], jax.Array]] = {
        name: partial(jax.jit(matmul), kernel=weight.astype(name))
        for name in ("float32", "bfloat16")
    }
    for kind in KINDS:
        stored = jax.jit(partial(quantise, kind=kind))(weight)
        of_kind = jax.jit(partial(quantised_matmul, kind=kind, dtype=jnp.dtype("float32")))
        programs[kind] = partial(of_kind, weight=stored)
    return programs
