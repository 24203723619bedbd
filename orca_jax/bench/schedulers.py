"""Iteration-level against request-level scheduling: same engine, same trace, same arrivals."""

import argparse
import dataclasses
import json

from orca_jax.bench.measure import hardware, print_table, run_trace, summarize, warm_up
from orca_jax.bench.offline import add_trace_args
from orca_jax.bench.traces import TraceRequest, make_trace
from orca_jax.build import build_engine
from orca_jax.config import EngineConfig, SchedulerName
from orca_jax.serve.engine_args import add_engine_args, engine_config_from_args

HELP = "iteration-level against request-level scheduling"


def add_args(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark and of the engine."""
    add_trace_args(parser)
    parser.add_argument(
        "--load", type=float, nargs="+", default=[1.1], metavar="X",
        help="arrival rates, as multiples of what request-level scheduling can serve (default: 1.1)",
    )  # fmt: skip
    add_engine_args(parser, model="preset:gpt2", max_num_seqs=16)


def run(args: argparse.Namespace) -> None:
    """Find the baseline's saturation with all requests at once, then offer multiples of it to both."""
    config = engine_config_from_args(args)
    names: tuple[SchedulerName, SchedulerName] = ("request_level", "orca")
    saturated = {name: _measure(config, name, args, None) for name in names}
    capacity = saturated["request_level"]["requests_per_s"]
    rows = [_compare("all at once", saturated)]
    for load in args.load:
        rate = load * capacity
        rows.append(
            _compare(f"{load:g} x saturation, {rate:.3g} req/s", {n: _measure(config, n, args, rate) for n in names})
        )
    line = {"capacity_requests_per_s": capacity, "comparisons": rows, "hardware": hardware()}
    trace = {"trace": args.trace, "num_requests": args.num_requests, "load": args.load}
    print(json.dumps({**line, "config": {**dataclasses.asdict(config), **trace}}))


def _measure(
    config: EngineConfig, scheduler: SchedulerName, args: argparse.Namespace, rate: float | None
) -> dict[str, float]:
    built = build_engine(dataclasses.replace(config, scheduler=scheduler))
    try:
        trace: list[TraceRequest] = make_trace(
            args.trace,
            num_requests=args.num_requests,
            vocab_size=built.model_config.vocab_size,
            seed=args.seed,
            rate=rate,
        )
        warm_up(built.engine, trace)
        return summarize(run_trace(built.engine, trace))
    finally:
        built.engine.executor.close()


def _compare(title: str, results: dict[SchedulerName, dict[str, float]]) -> dict[str, object]:
    """Both columns and their ratio."""
    baseline, ours = results["request_level"], results["orca"]
    row: dict[str, object] = {
        "arrivals": title,
        "throughput_ratio": ours["requests_per_s"] / baseline["requests_per_s"],
        "median_normalized_latency_ratio": (
            baseline["median_normalized_latency_ms"] / ours["median_normalized_latency_ms"]
        ),
    }
    for name in ("requests_per_s", "output_tokens_per_s", "median_normalized_latency_ms", "p99_ttft_ms", "iterations"):
        row[f"request_level_{name}"], row[f"orca_{name}"] = baseline[name], ours[name]
    print_table(title, row)
    return row
