"""Run a workload on the engine in this process: throughput, latency, and the time of the host."""

import argparse
import dataclasses
import json

from orca_jax.assembly.engine import build_engine
from orca_jax.flags import add_engine_args, add_number, engine_config_from_args
from orca_jax.helpers.reporting import hardware, name_tails, print_table
from orca_jax.tools.bench.measure import run_workload, summarize, warm_up
from orca_jax.tools.bench.workload.generate import (
    add_workload_args,
    workload_from_args,
    workload_settings,
)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark and of the engine."""
    add_workload_args(parser)
    parser.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help="Poisson arrivals per second; default: all requests at once",
    )
    add_number(parser, "--temperature", 0.0, "temperature of every request", metavar="X")
    add_engine_args(parser, has_word=True, model="preset:gpt2")


def run(args: argparse.Namespace) -> None:
    """Run the workload; print tables and a line of JSON."""
    config = engine_config_from_args(args)
    with build_engine(config) as built:
        workload = workload_from_args(
            args,
            vocab_size=built.model_config.vocab_size,
            max_model_len=built.max_model_len,
            rate=args.rate,
        )
        warm_up(built.engine, workload)
        result = summarize(run_workload(built.engine, workload, temperature=args.temperature))
        shown = name_tails(result, len(workload), sum(each.num_output - 1 for each in workload))
        print_table(
            f"{config.model}, {args.num_requests} requests of {args.trace}, {config.scheduler}",
            shown,
        )
    settings = {**workload_settings(args), "rate": args.rate, "temperature": args.temperature}
    print(
        json.dumps(
            {**result, "hardware": hardware(), "config": {**dataclasses.asdict(config), **settings}}
        )
    )
