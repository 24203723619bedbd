"""Run one burst of requests of mixed lengths under request-level scheduling, then under --scheduler.

Prompts are random ids, and end tokens are ignored. The timelines correspond to Figures 2 to 4 of the paper.
"""

import argparse
import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import replace

from orca_jax.assembly.built import Built
from orca_jax.assembly.engine import build_engine
from orca_jax.assembly.support import adapted
from orca_jax.flags import add_engine_args, add_number, engine_config_from_args
from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.timeline.measure import Timeline, figures, shown_figures
from orca_jax.timeline.record import record
from orca_jax.tools.bench.measure import reschedule, run_workload, warm_up
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.tools.timeline.flags import add_plot_args
from orca_jax.tools.timeline.views import write_plot
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the burst, of the picture and of the engine."""
    add_number(parser, "--num-requests", 16, "number of requests")
    for name, bounds, what in (("prompt", (4, 24), "prompt"), ("output", (2, 40), "generated")):
        parser.add_argument(
            f"--{name}-tokens", type=int, nargs=2, default=bounds, metavar=("LOW", "HIGH"),
            help=f"range of {what} tokens, uniform (default: {bounds[0]} {bounds[1]})",
        )  # fmt: skip
    add_plot_args(parser)
    add_engine_args(
        parser, has_word=True, scheduler="orca", max_num_seqs=4, max_num_batched_tokens=128
    )


def run(args: argparse.Namespace) -> None:
    """Run the burst under both schedulers; print a table for each and a line of JSON.

    Raises:
        ConfigError: a setting is wrong.
    """
    config = engine_config_from_args(args)
    prompt = tuple(args.prompt_tokens)
    output = tuple(args.output_tokens)
    burst = mixed_burst(
        args.num_requests, prompt_tokens=prompt, output_tokens=output, seed=config.seed
    )
    runs = run_burst(config, burst, ("request_level", config.scheduler))
    for name, each in runs.items():
        print_table(name, shown_figures(each))
    line = {name: figures(each) for name, each in runs.items()}
    print(
        json.dumps({**line, "config": dataclasses.asdict(config), "hardware": hardware()}),
        flush=True,
    )
    write_plot(list(runs.values()), args)  # at the end: a plot that fails loses no figure


def mixed_burst(
    num_requests: int,
    *,
    prompt_tokens: tuple[int, int] = (4, 24),
    output_tokens: tuple[int, int] = (2, 40),
    vocab_size: int = 256,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Make requests with lengths uniform between two bounds, which arrive at once. Prompts are random ids.

    Raises:
        ConfigError: a number is below 1, or a lower bound is above the upper one; `param` names it.
    """
    for name, value in (("num_requests", num_requests), ("vocab_size", vocab_size)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}", param=name)
    for name, (low, high) in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if not 1 <= low <= high:
            raise ConfigError(
                f"{name} must be two numbers, 1 <= low <= high, got {low} and {high}", param=name
            )
    draw = random.Random(f"burst-{seed}")
    lengths = [
        (draw.randint(*prompt_tokens), draw.randint(*output_tokens)) for _ in range(num_requests)
    ]
    return [
        WorkloadRequest(0.0, tuple(draw.choices(range(vocab_size), k=size)), output)
        for size, output in lengths
    ]


def run_burst(
    config: EngineConfig, burst: Sequence[WorkloadRequest], schedulers: Sequence[str]
) -> dict[str, Timeline]:
    """Record a burst under each scheduler in turn, on one executor. End tokens are ignored.

    Raises:
        ConfigError: a setting is wrong, or `trace_file` is set.
        RequestError: a request is too large for the engine.
    """
    configs = {name: adapted(replace(config, scheduler=name)) for name in schedulers}
    with build_engine(config) as built:
        warm_up(built.engine, burst)
        return {name: _recorded(built, each, burst) for name, each in configs.items()}


def _recorded(built: Built, config: EngineConfig, burst: Sequence[WorkloadRequest]) -> Timeline:
    reschedule(built, config)
    with record(
        replace(built, timeline_header=replace(built.timeline_header, config=config))
    ) as recording:
        run_workload(built.engine, burst)
    return recording.timeline
