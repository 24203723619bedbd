"""Measure the host time and the device idle time per iteration, with a constant number of running requests."""

import argparse
import dataclasses
import json
import random
import statistics

from orca_jax.assembly.engine import build_engine
from orca_jax.flags import add_engine_args, add_number, engine_config_from_args
from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.tools.bench.measure import run_workload, summarize, warm_up
from orca_jax.tools.bench.workload.generate import WorkloadRequest
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError

NUM_INPUT, NUM_OUTPUT = 32, 128  # tokens; equal, so that nearly all iterations have all requests
SHOWN = (
    *(
        "mean_batch_size",
        "iterations",
        "iteration_ms",
        "host_ms_per_iteration",
        "schedule_ms",
        "pack_ms",
        "update_ms",
    ),
    *("dispatch_ms_per_iteration", "device_idle_ms_per_iteration", "device_idle_share"),
)
PARTS = ("schedule_seconds", "pack_seconds", "update_seconds")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark and of the engine."""
    add_number(parser, "--running", [64, 256], "running requests", nargs="+")
    add_number(parser, "--passes", 3, "passes; the result is the median")
    add_engine_args(
        parser,
        without=("max_num_seqs",),  # --running
        model="preset:gpt2-tiny",
        scheduler="chunked",
        max_model_len=NUM_INPUT + NUM_OUTPUT,
    )


def run(args: argparse.Namespace) -> None:
    """Measure each number of running requests on a new engine; print tables and a line of JSON."""
    if min(args.running) < 1 or args.passes < 1:
        raise ConfigError(
            "running and passes must be at least 1",
            param="passes" if args.passes < 1 else "running",
        )
    config = engine_config_from_args(args)
    rows = []
    for running in args.running:
        row = _measure(dataclasses.replace(config, max_num_seqs=running), args.passes)
        print_table(f"{config.model}, {running} running requests, {config.scheduler}", row)
        rows.append({"running": running, **row})
    print(
        json.dumps(
            {
                "rows": rows,
                "passes": args.passes,
                "hardware": hardware(),
                "config": dataclasses.asdict(config),
            }
        )
    )


def _measure(config: EngineConfig, passes: int) -> dict[str, float]:
    """Return the median of each figure over the passes, with the least and the most host time."""
    with build_engine(config) as built:
        ids = random.Random(config.seed)
        vocabulary = range(built.model_config.vocab_size)
        number = config.max_num_seqs

        def workload() -> list[WorkloadRequest]:
            """New prompts, so that no pass begins with the pages of an earlier one."""
            return [
                WorkloadRequest(0.0, tuple(ids.choices(vocabulary, k=NUM_INPUT)), NUM_OUTPUT)
                for _ in range(number)
            ]

        warm_up(built.engine, workload())
        found = []
        for _ in range(passes):
            done = run_workload(built.engine, workload())
            figures = summarize(done)
            iterations = done.figures["iterations"]
            parts = {
                name.replace("_seconds", "_ms"): 1e3 * done.figures[name] / iterations
                for name in PARTS
            }
            found.append({**figures, **parts, "iteration_ms": 1e3 * done.wall / iterations})
    row = {name: statistics.median([each[name] for each in found]) for name in SHOWN}
    host = [each["host_ms_per_iteration"] for each in found]
    return {**row, "host_ms_least": min(host), "host_ms_most": max(host)}
