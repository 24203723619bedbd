"""Checks and measures the MLPs of experts: plain and stored matrices against the oracle, then their speed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lab.device_check.correct import judged
from lab.device_check.part import Found, Setting, Write, attempt
from lab.device_check.rates import seconds_per_call
from orca_jax.kernels.expert_mlp import ExpertKernels, KernelForm, expert_mlp
from orca_jax.kernels.matmul import PER_BYTE, MatrixKind, Quantised, quantised_matmul
from orca_jax.model.matrices.quantise import expand

KINDS: tuple[MatrixKind | None, ...] = (None, "fp4", "fp8", "int8", "int4")
GROUP = 32  # inputs with one scale, of two numbers in a byte
SIZES = (32, 2880)  # experts and width of gpt-oss-20b
DRY_SIZES = (4, 64)
PER_TOKEN = 4
TOKENS = (64, 2048)
ALLOWED = 0.02  # difference, as a share of the largest number; factors are bfloat16


def experts(what: str, setting: Setting, write: Write) -> None:
    """Compare each kind with the oracle, and measure it; `what` is not used."""
    sizes = DRY_SIZES if setting.dry_run else SIZES
    kinds = KINDS[:2] if setting.dry_run else KINDS
    for kind in kinds:
        attempt(write, partial(compare, kind, (4, DRY_SIZES[1] * 2)), kind=kind or "bfloat16")
    for kind in kinds:
        for tokens in (8,) if setting.dry_run else TOKENS:
            about = {"kind": kind or "bfloat16", "tokens": tokens}
            attempt(write, partial(measure, kind, sizes, tokens, setting), **about)


def compare(kind: MatrixKind | None, sizes: tuple[int, int]) -> Found:
    """The largest difference from the oracle on the same device."""
    given = inputs(kind, sizes, 37)
    ours, oracle = (jax.jit(mixing(kind, name))(*given) for name in (None, "dense"))
    apart = np.abs(np.asarray(ours) - np.asarray(oracle))
    return judged(apart, ALLOWED * float(jnp.abs(oracle).max()))


def measure(
    kind: MatrixKind | None, sizes: tuple[int, int], tokens: int, setting: Setting
) -> Found:
    """Seconds of a layer, and the bytes of all matrices and the chosen experts' operations in a second."""
    x, *fixed = inputs(kind, sizes, tokens)
    mix = mixing(kind, None)

    def call(index: jax.Array, x: jax.Array, *fixed: Any) -> jax.Array:
        return mix(x, *fixed).astype(x.dtype)

    repeats = 2 if setting.dry_run else 20
    seconds = seconds_per_call(call, x, *fixed, repeats=repeats)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(fixed[-1]))
    operations = 6 * tokens * PER_TOKEN * sizes[1] ** 2
    return {
        "us": 1e6 * seconds,
        "bytes_per_s": stored / seconds,
        "flop_per_s": operations / seconds,
    }


def mixing(kind: MatrixKind | None, implementation: str | None) -> Callable[..., jax.Array]:
    """The operation on stored or plain matrices."""
    form = KernelForm()
    if kind is not None:
        settings: Found = {"kind": kind, "dtype": jnp.dtype(jnp.bfloat16)}
        form = KernelForm(
            partial(quantised_matmul, **settings), partial(expand, **settings), **settings
        )
    return partial(
        expert_mlp,
        activation=lambda gate, up: jax.nn.silu(gate) * up,
        form=form,
        implementation=implementation,
    )


def inputs(kind: MatrixKind | None, sizes: tuple[int, int], tokens: int) -> tuple[Any, ...]:
    """Tokens, their experts and weights, and matrices with random bits."""
    count, width = sizes
    draw = np.random.default_rng(0)
    chosen = np.stack([draw.permutation(count)[:PER_TOKEN] for _ in range(tokens)])
    keys = iter(jax.random.split(jax.random.key(0), 8))
    return (
        jax.random.normal(next(keys), (tokens, width), jnp.bfloat16),
        jnp.asarray(chosen, jnp.int32),
        jnp.full((tokens, PER_TOKEN), 1 / PER_TOKEN, jnp.float32),
        ExpertKernels(*(matrix(kind, count, width, next(keys)) for _ in range(3))),
    )


def matrix(kind: MatrixKind | None, count: int, width: int, key: jax.Array) -> Any:
    """The matrices of all experts, whose products have numbers of order one."""
    size = width**-0.5
    if kind is None:
        return size * jax.random.normal(key, (count, width, width), jnp.bfloat16)
    shape = count, width // PER_BYTE[kind], width
    if kind == "fp8":
        values = jax.random.normal(key, shape, jnp.float32).astype(jnp.float8_e4m3fn)
        return Quantised(values, jnp.full((count, width), size))
    values = jax.random.randint(key, shape, -128, 128, jnp.int8)
    if kind == "int8":
        return Quantised(values, jnp.full((count, width), size / 74))
    return Quantised(values, jnp.full((count, width // GROUP, width), size / 5))
