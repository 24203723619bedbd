"""Measure the cost of adapters: tokens/s with some adapters in one batch, against an engine without adapters.

Two engines are in memory, one with slots of adapters and one without, and their passes alternate. The adapters are
random and of one rank. `attention` adapts queries, keys and values, as PEFT does for GPT-2 by default, and `all` every
linear layer of a block. Requests take the adapters in turn.
"""

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orca_jax.assembly.built import Built
from orca_jax.assembly.choices import is_toy
from orca_jax.assembly.engine import build_engine
from orca_jax.engine import Engine
from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.model.lora.stacks import groups_of, zero_values
from orca_jax.model.sharding import on_shards
from orca_jax.values.config import EngineConfig, LoraConfig, ModelConfig
from orca_jax.values.errors import ConfigError
from orca_jax.values.lora_request import Adapter
from orca_jax.values.request import SamplingParams

PROMPT_TOKENS = 16
KINDS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "all": ("attention", "attention_out", "mlp", "mlp_out"),
}
"""Groups of adapted layers, by the name of the kind."""


class Arrangement(NamedTuple):
    """A row of the table: the number of different adapters in the batch, and their kind."""

    adapters: int
    kind: str | None  # None: no request has an adapter
    has_slots: bool = True

    @property
    def name(self) -> str:
        """Such as "8 adapters of all layers"."""
        if self.kind is None:
            return "slots, not used" if self.has_slots else "no slots"
        return f"{self.adapters} of {self.kind}"


def run(args: argparse.Namespace) -> None:
    """Measure all rows; print a table and a line of JSON.

    Raises:
        ConfigError: a flag is wrong.
    """
    for name, value in (("rows", args.rows), ("output_len", args.output_len), ("rank", args.rank)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1", param=name)
    if args.passes < 1 or min(args.adapters) < 1:
        raise ConfigError("passes and adapters must be at least 1", param="passes")
    if is_toy(args.model):
        raise ConfigError(f"model must be one with weights, not {args.model}", param="model")
    rows = [Arrangement(0, None, has_slots=False), Arrangement(0, None)]
    rows += [Arrangement(number, kind) for kind, number in product(KINDS, args.adapters)]
    sizes: dict[str, Any] = {"max_num_seqs": args.rows, "progress": False}
    most = max(args.adapters)
    lora: dict[str, Any] = {
        "max_loras": most,
        "max_lora_rank": args.rank,
        "max_cpu_loras": 2 * most,
    }
    plain = EngineConfig(args.model, **sizes)
    with (
        build_engine(plain) as without,
        # Strict, as the last one that compiles: compilations are counted for the whole process.
        build_engine(
            EngineConfig(args.model, enable_lora=True, strict_compile=True, **lora, **sizes)
        ) as built,
    ):
        for kind in KINDS:
            add_random(built, kind, most, args.rank)
        speeds = measure(without.engine, built.engine, rows, args)
    base = statistics.median(speeds[rows[0]])
    ratios = {row.name: _ratio(speeds[rows[0]], speeds[row]) for row in rows}
    print_table(
        f"{args.model}, {args.rows} requests, rank {args.rank}: share of the tokens/s without slots",
        ratios,
    )
    medians = {row.name: round(statistics.median(values), 1) for row, values in speeds.items()}
    settings = {name: value for name, value in vars(args).items() if name not in ("run", "command")}
    print(
        json.dumps(
            {
                "tokens_per_s": medians,
                "ratio": ratios,
                "base": base,
                "hardware": hardware(),
                "config": settings,
            }
        )
    )


def measure(
    without: Engine, engine: Engine, rows: Sequence[Arrangement], args: argparse.Namespace
) -> dict[Arrangement, list[float]]:
    """Tokens per second of each pass of each row; the rows take turns."""
    speeds: dict[Arrangement, list[float]] = {row: [] for row in rows}
    for number in range(args.passes + 1):
        for row in rows:
            seconds = one_pass(
                engine if row.has_slots else without, row, args.rows, args.output_len
            )
            if number:  # the first turn warms up
                speeds[row].append(args.rows * args.output_len / seconds)
    return speeds


def one_pass(engine: Engine, row: Arrangement, num_requests: int, output_len: int) -> float:
    """Seconds for requests that arrive together. Prompts differ in their first token, so that none are shared."""
    params = SamplingParams(max_tokens=output_len, temperature=0, ignore_eos=True)
    random = np.random.default_rng(0)
    start = time.perf_counter()
    for number in range(num_requests):
        ids = random.integers(0, engine.pool.vocab_size, PROMPT_TOKENS).tolist()
        name = None if row.kind is None else f"{row.kind} {number % row.adapters}"
        engine.add_request(
            str(number), [number % engine.pool.vocab_size, *ids], params, adapter=name
        )
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start


def add_random(built: Built, kind: str, number: int, rank: int) -> None:
    """Add adapters with random matrices to an engine."""
    config = built.executor_config
    assert config is not None and config.lora is not None, "the engine has slots"
    model = on_shards(built.model_config, config.tensor_parallel_size)
    for index in range(number):
        values = random_values(model, config.lora, KINDS[kind], rank, index)
        types = {
            name: zero.dtype for name, zero in zero_values(model, config.lora, config.dtype).items()
        }
        typed = {name: each.astype(types[name]) for name, each in values.items()}
        built.engine.add_adapter(Adapter(f"{kind} {index}", f"random {kind} {index}"), typed)


def random_values(
    model: ModelConfig, lora: LoraConfig, groups: Sequence[str], rank: int, seed: int
) -> dict[str, NDArray[Any]]:
    """The arrays of an adapter of some groups of layers."""
    random = np.random.default_rng(seed)
    values = zero_values(model, lora, "float32")
    for number, (name, group) in enumerate(groups_of(model).items()):
        if name not in groups:
            continue
        values["active"][number] = 1
        for each in (f"{name}.shrink", *group.targets):
            values[each] = 0.01 * random.standard_normal(values[each].shape, np.float32)
    return values


def _ratio(base: Sequence[float], other: Sequence[float]) -> float:
    """The median over passes of the same turn, which share the load of the machine."""
    return round(
        statistics.median(one / before for before, one in zip(base, other, strict=True)), 3
    )
