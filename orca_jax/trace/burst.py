"""The same burst of requests of mixed lengths, under one scheduler or several: what the paper's Figures 2 to 4 draw."""

import random
from collections.abc import Sequence
from dataclasses import replace

from orca_jax.bench.measure import run_trace, warm_up
from orca_jax.bench.reschedule import reschedule
from orca_jax.bench.traces import TraceRequest
from orca_jax.build import Built, build_engine
from orca_jax.config import EngineConfig, SchedulerName
from orca_jax.errors import ConfigError
from orca_jax.trace.record import record
from orca_jax.trace.run import Run


def mixed_burst(
    num_requests: int,
    *,
    prompt_tokens: tuple[int, int] = (4, 24),
    output_tokens: tuple[int, int] = (2, 40),
    vocab_size: int = 256,
    seed: int = 0,
) -> list[TraceRequest]:
    """Requests that arrive at once, of lengths uniform between both bounds. Random ids stand for text.

    Raises:
        ConfigError: a number is below 1, or a lower bound is above its upper one; `param` names it.
    """
    for name, value in (("num_requests", num_requests), ("vocab_size", vocab_size)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}", param=name)
    for name, (low, high) in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if not 1 <= low <= high:
            raise ConfigError(f"{name} must be two numbers, 1 <= low <= high, got {low} and {high}", param=name)
    draw = random.Random(f"burst-{seed}")
    lengths = [(draw.randint(*prompt_tokens), draw.randint(*output_tokens)) for _ in range(num_requests)]
    return [TraceRequest(0.0, tuple(draw.choices(range(vocab_size), k=size)), output) for size, output in lengths]


def run_burst(
    config: EngineConfig, burst: Sequence[TraceRequest], schedulers: Sequence[SchedulerName]
) -> dict[SchedulerName, Run]:
    """What each scheduler made of a burst, one after the other on one executor. Nothing ends before its length.

    Raises:
        ConfigError: a setting is wrong, or a trace_file is set, for which this has no use.
        RequestError: a request could never run.
    """
    configs = {name: replace(config, scheduler=name) for name in schedulers}
    built = build_engine(config)
    try:
        warm_up(built.engine, burst)
        return {name: _recorded(built, each, burst) for name, each in configs.items()}
    finally:
        built.engine.executor.close()


def _recorded(built: Built, config: EngineConfig, burst: Sequence[TraceRequest]) -> Run:
    reschedule(built, config)
    with record(replace(built, head=replace(built.head, config=config))) as recording:
        run_trace(built.engine, burst)
    return recording.run
