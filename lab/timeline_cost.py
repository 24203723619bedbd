"""Measure the cost of `--trace-file`: the time in the timeline writer, as a share of the whole time."""

import argparse
import dataclasses
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from orca_jax.assembly.engine import build_engine
from orca_jax.bench.measure import run_workload, warm_up
from orca_jax.bench.workload.generate import add_workload_args, workload_from_args, workload_settings
from orca_jax.flags import add_engine_args, engine_config_from_args
from orca_jax.observer import Observer
from orca_jax.reporting import hardware, print_table

HOOKS = ("arrived", "selecting", "preempted", "planned", "submitted", "collected", "delivered", "flush")


class TimedObserver(Observer):
    """Passes all calls on, and measures their time, its own overhead included."""

    def __init__(self, inner: Observer) -> None:
        self.seconds = 0.0
        for name in HOOKS:
            setattr(self, name, self._timed(getattr(inner, name)))

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: object) -> None:
            start = time.perf_counter()
            hook(*args)
            self.seconds += time.perf_counter() - start

        return timed


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark and of the engine."""
    add_workload_args(parser)
    add_engine_args(parser, model="preset:gpt2", scheduler="chunked")


def run(args: argparse.Namespace) -> None:
    """Run all requests at once; print a table and a line of JSON."""
    config = engine_config_from_args(args)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(config.trace_file or f"{folder}/workload.jsonl")
        with build_engine(dataclasses.replace(config, trace_file=str(path))) as built:
            vocab_size = built.model_config.vocab_size
            workload = workload_from_args(args, vocab_size=vocab_size, max_model_len=built.max_model_len, rate=None)
            warm_up(built.engine, workload)
            timed = built.engine.observer = TimedObserver(built.engine.observer)
            size = path.stat().st_size
            done = run_workload(built.engine, workload)
        num_bytes = path.stat().st_size - size
    iterations = done.figures["iterations"]
    result = {
        "share_of_wall_time": timed.seconds / done.wall,
        "us_per_iteration": 1e6 * timed.seconds / iterations,
        "ms_per_iteration_in_all": 1e3 * done.wall / iterations,
        "mean_batch_size": done.figures["scheduled_requests"] / iterations,
        "bytes_per_iteration": num_bytes / iterations,
        "iterations": iterations,
    }
    print_table(f"{config.model}, {args.num_requests} requests of {args.trace}, traced", result)
    settings = {**dataclasses.asdict(config), **workload_settings(args)}
    print(json.dumps({**result, "hardware": hardware(), "config": settings}))
