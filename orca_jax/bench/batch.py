"""A trace as a batch file against the same trace straight into the engine: what files, text and rows cost.

Both run on one engine in one process, in turn, so that what else the machine does hits both alike.
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

from orca_jax.batch.config import BatchConfig, server_config
from orca_jax.batch.run import run_batch
from orca_jax.bench.measure import run_workload, warm_up
from orca_jax.bench.workload.generate import WorkloadRequest, add_workload_args, workload_from_args, workload_settings
from orca_jax.build.engine import Built, build_engine
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError, EngineError
from orca_jax.flags import add_engine_args, engine_config_from_args
from orca_jax.reporting import hardware, print_table

HELP = "a batch file against the same requests straight into the engine"


class Pass(NamedTuple):
    """Seconds of one pass, by the clock and of all its threads together."""

    wall: float
    cpu: float


def add_args(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark and of the engine."""
    add_workload_args(parser)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="passes of each kind (default: 3)")
    # Every pass has the same prompts, of which all but the first would find most computed.
    add_engine_args(parser, model="demo", enable_prefix_caching=False)


def run(args: argparse.Namespace) -> None:
    """Run it and print a table and a line of JSON."""
    if args.rounds < 1:
        raise ConfigError(f"rounds must be at least 1, got {args.rounds}", param="rounds")
    config = engine_config_from_args(args)
    with build_engine(config) as built:
        vocab_size = built.model_config.vocab_size
        trace = workload_from_args(args, vocab_size=vocab_size, max_model_len=built.max_model_len, rate=None)
        warm_up(built.engine, trace)
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "in.jsonl"
            source.write_bytes(b"".join(_line(config.model, number, one) for number, one in enumerate(trace)))
            offline, batch, last = _rounds(config, built, trace, source, args.rounds)
    tokens = sum(request.num_output for request in trace)
    pairs = list(zip(offline, batch, strict=True))
    result = {
        "offline_tokens_per_s": tokens * len(offline) / sum(one.wall for one in offline),
        "batch_tokens_per_s": tokens * len(batch) / sum(one.wall for one in batch),
        "batch_to_offline": sum(one.wall for one in offline) / sum(one.wall for one in batch),
        "median_batch_to_offline": statistics.median(one.wall / other.wall for one, other in pairs),
        "offline_cpu_us_per_request": _cpu_us(offline, trace),
        "batch_cpu_us_per_request": _cpu_us(batch, trace),
        "offline_wall_s": [one.wall for one in offline],
        "batch_wall_s": [one.wall for one in batch],
    }
    print_table(f"{config.model}, {args.num_requests} requests of {args.trace}, {args.rounds} rounds", result)
    whole = {**result, "last_batch": last, "hardware": hardware(), "config": dataclasses.asdict(config)}
    print(json.dumps({**whole, **workload_settings(args)}))


def _rounds(
    config: EngineConfig, built: Built, trace: Sequence[WorkloadRequest], source: Path, rounds: int
) -> tuple[list[Pass], list[Pass], dict[str, Any]]:
    """Each pass, straight and by file, which of the two comes first in turn; and the last file's summary."""
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
            # What a user waits for beside the loading of the model: the look at the input, too.
            wall = last["wall_s"] + last["examine_s"] + last["resume_s"]
            batch.append(Pass(wall, time.process_time() - start))
        else:
            wall = run_workload(built.engine, trace).wall
            offline.append(Pass(wall, time.process_time() - start))
    return offline, batch, last


def _cpu_us(passes: Sequence[Pass], trace: Sequence[WorkloadRequest]) -> float:
    """Processor time of all threads for a request, in microseconds, in the pass that took the least."""
    return 1e6 * min(one.cpu for one in passes) / len(trace)


def _line(model: str, number: int, request: WorkloadRequest) -> bytes:
    """The request that `run_workload` makes of it, as a row."""
    body = {"model": model, "prompt": request.prompt_ids, "max_tokens": request.num_output, "temperature": 0}
    body |= {"seed": number, "ignore_eos": True}
    row = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return msgspec.json.encode(row) + b"\n"
