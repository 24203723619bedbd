"""Compare a batch file with the same requests sent to the engine directly: the cost of files, text and rows.

Both kinds of pass take turns on one engine in one process, so that other load on the machine affects both.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from orca_jax.assembly.built import Built
from orca_jax.assembly.engine import build_engine
from orca_jax.batch.config import BatchConfig, server_config
from orca_jax.batch.run import run_batch
from orca_jax.flags import add_engine_args, add_number, engine_config_from_args
from orca_jax.helpers.reporting import hardware, print_table
from orca_jax.tools.bench.measure import run_workload, warm_up
from orca_jax.tools.bench.workload.generate import (
    WorkloadRequest,
    add_workload_args,
    workload_from_args,
    workload_settings,
)
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError, EngineError


class Pass(NamedTuple):
    """Seconds of one pass: elapsed time, and processor time of all threads."""

    wall: float
    cpu: float


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark and of the engine."""
    add_workload_args(parser)
    add_number(parser, "--rounds", 3, "passes of each kind")
    # All passes have the same prompts, so with prefix caching later ones would find most of them in the cache.
    add_engine_args(parser, model="demo", enable_prefix_caching=False)


def run(args: argparse.Namespace) -> None:
    """Run the benchmark; print a table and a line of JSON."""
    if args.rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {args.rounds}", param="rounds")
    config = engine_config_from_args(args)
    with build_engine(config) as built:
        vocab_size = built.model_config.vocab_size
        workload = workload_from_args(
            args, vocab_size=vocab_size, max_model_len=built.max_model_len, rate=None
        )
        warm_up(built.engine, workload)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "in.jsonl"
            source.write_bytes(
                b"".join(_line(config.model, number, one) for number, one in enumerate(workload))
            )
            offline, batch, last = _rounds(config, built, workload, source, args.rounds)
    tokens = sum(request.num_output for request in workload)
    pairs = list(zip(offline, batch, strict=True))
    result = {
        "offline_tokens_per_s": tokens * len(offline) / sum(one.wall for one in offline),
        "batch_tokens_per_s": tokens * len(batch) / sum(one.wall for one in batch),
        "batch_to_offline": sum(one.wall for one in offline) / sum(one.wall for one in batch),
        "median_batch_to_offline": statistics.median(one.wall / other.wall for one, other in pairs),
        "offline_cpu_us_per_request": _cpu_us(offline, workload),
        "batch_cpu_us_per_request": _cpu_us(batch, workload),
        "offline_wall_s": [one.wall for one in offline],
        "batch_wall_s": [one.wall for one in batch],
    }
    print_table(
        f"{config.model}, {args.num_requests} requests of {args.trace}, {args.rounds} rounds",
        result,
    )
    whole = {
        **result,
        "last_batch": last,
        "hardware": hardware(),
        "config": dataclasses.asdict(config),
    }
    print(json.dumps({**whole, **workload_settings(args)}))


def _rounds(
    config: EngineConfig,
    built: Built,
    workload: Sequence[WorkloadRequest],
    source: Path,
    rounds: int,
) -> tuple[list[Pass], list[Pass], dict[str, Any]]:
    """Run all passes, and take turns with the kind that runs first.

    Returns:
        The passes of the engine, the passes of the batch file, and the summary of the last batch run.
    """
    settings = dataclasses.replace(config, progress=False)
    offline: list[Pass] = []
    batch: list[Pass] = []
    last: dict[str, Any] = {}
    for number, is_batch in itertools.product(range(rounds), (False, True)):
        start = time.process_time()
        if is_batch == (number % 2 == 0):
            output = source.with_name(f"out-{number}.jsonl")
            last = run_batch(BatchConfig(source, output, server_config(settings)), built).result
            if last["errors"]:
                raise EngineError(f"rows became errors: {last['errors']}")
            # A user also waits for the check of the input.
            wall = last["wall_s"] + last["examine_s"] + last["resume_s"]
            batch.append(Pass(wall, time.process_time() - start))
        else:
            wall = run_workload(built.engine, workload).wall
            offline.append(Pass(wall, time.process_time() - start))
    return offline, batch, last


def _cpu_us(passes: Sequence[Pass], workload: Sequence[WorkloadRequest]) -> float:
    """Return the processor time per request of the fastest pass, in microseconds, over all threads."""
    return 1e6 * min(one.cpu for one in passes) / len(workload)


def _line(model: str, number: int, request: WorkloadRequest) -> bytes:
    """Return a row with the parameters that `run_workload` gives to the request."""
    body = {
        "model": model,
        "prompt": request.prompt_ids,
        "max_tokens": request.num_output,
        "temperature": 0,
    }
    body |= {"seed": number, "ignore_eos": True}
    row = {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": body,
    }
    return msgspec.json.encode(row) + b"\n"
