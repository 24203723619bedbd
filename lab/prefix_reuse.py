"""Compare prefix caching with no prefix caching: hits, possible hits, gain and cost.

Passes with and without prefix caching take turns on one executor, each with an empty pool. The cost is the time of
the code that only prefix caching runs: digests, and the look-up and registration of pages. With `--max-num-seqs 1`
requests run in order, and the hits must be those of an LRU cache of the same size. With more, requests with equal
beginnings may run at the same time and miss each other. Misses are counted by reason.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable

from lab.prefix_hits import Admissions, count_missed, possible_hits
from orca_jax.assembly.built import Built
from orca_jax.assembly.choices import choices_of
from orca_jax.assembly.engine import build_engine
from orca_jax.flags import add_engine_args, add_number, engine_config_from_args
from orca_jax.helpers.reporting import hardware, name_tails, print_table
from orca_jax.sched.pool import RequestPool
from orca_jax.tools.bench.measure import (
    PassResult,
    mean_figures,
    reschedule,
    run_workload,
    summarize,
    warm_up,
)
from orca_jax.tools.bench.workload.generate import (
    WorkloadRequest,
    add_workload_args,
    workload_from_args,
    workload_settings,
)
from orca_jax.values.errors import ConfigError

# of `PrefixReuse`: all that it adds to a step
TIMED = ("awaits_prompt", "find", "begin", "end", "remember")


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark and of the engine."""
    add_workload_args(parser, "mooncake")
    parser.add_argument(
        "--rate", type=float, metavar="R", help="arrivals per second; default: all requests at once"
    )
    add_number(parser, "--repeat", 1, "passes per kind, averaged")
    # Two pools take turns, so a timeline would mix their requests.
    add_engine_args(parser, without=("trace_file",), model="preset:gpt2", scheduler="chunked")


def run(args: argparse.Namespace) -> None:
    """Run all passes; print a table and a line of JSON."""
    config = engine_config_from_args(args)
    if args.repeat < 1:
        raise ConfigError(f"repeat must be at least 1, got {args.repeat}", param="repeat")
    if not choices_of(config).requests.reuses_prefixes:
        raise ConfigError(
            "scheduler must be chunked, with prefix caching enabled; the benchmark disables it for every other pass",
            param="scheduler",
        )
    with build_engine(config) as built:
        vocab_size = built.model_config.vocab_size
        max_model_len = built.max_model_len
        workload = workload_from_args(
            args, vocab_size=vocab_size, max_model_len=max_model_len, rate=args.rate
        )
        warm_up(built.engine, workload)
        passes = []
        for _ in range(args.repeat):
            reschedule(built, dataclasses.replace(config, enable_prefix_caching=False))
            without = run_workload(built.engine, workload)
            reschedule(built, config)
            passes.append(_compare(built, workload, without))
    result = mean_figures(passes)
    title = f"{config.model}, {args.num_requests} requests of {args.trace}"
    print_table(title, name_tails(result, len(workload), 0))  # it has no figure of gaps
    settings = {
        **dataclasses.asdict(config),
        **workload_settings(args),
        "rate": args.rate,
        "repeat": args.repeat,
    }
    print(json.dumps({**result, "hardware": hardware(), "config": settings}))


def _compare(
    built: Built, workload: list[WorkloadRequest], without: PassResult
) -> dict[str, float]:
    """Run a pass with prefix caching on a new pool, and compare it with one without."""
    kv = built.engine.pool.kv
    admissions = Admissions()
    spent = time_reuse(built.engine.pool)
    with built.engine.observed_by(admissions):
        done = run_workload(built.engine, workload)
    missed = count_missed(workload, kv.page_size, admissions)
    num_prompt = done.figures["cache_queries"]
    on = summarize(done)
    off = summarize(without)
    return {
        "hit_rate": done.figures["cache_hits"] / num_prompt,
        "possible_hit_rate_in_order": possible_hits(workload, kv.page_size, kv.num_blocks[0])
        / num_prompt,
        "hit_tokens": done.figures["cache_hits"],
        "missed_in_flight_tokens": missed.in_flight,
        "missed_evicted_tokens": missed.evicted,
        "throughput_ratio": on["total_tokens_per_s"] / off["total_tokens_per_s"],
        "requests_per_s_on": on["requests_per_s"],
        "requests_per_s_off": off["requests_per_s"],
        "p99_ttft_ms_on": on["p99_ttft_ms"],
        "p99_ttft_ms_off": off["p99_ttft_ms"],
        "reuse_share_of_wall": spent() / done.wall,
        "reuse_us_per_iteration": 1e6 * spent() / done.figures["iterations"],
        "iterations": done.figures["iterations"],
        "num_pages": kv.num_blocks[0],
        "preemptions": done.figures["preemptions"],
    }


def time_reuse(pool: RequestPool) -> Callable[[], float]:
    """Measure the methods of `TIMED` from now on. Return a function that returns the seconds so far."""
    total, depth = 0.0, 0

    def timed(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            nonlocal total, depth
            start = time.perf_counter()
            depth += 1
            result = function(*args)
            depth -= 1
            if not depth:  # one of them may call another one
                total += time.perf_counter() - start
            return result

        return call

    for name in TIMED:
        setattr(pool.reuse, name, timed(getattr(pool.reuse, name)))
    return lambda: total
