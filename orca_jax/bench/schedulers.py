"""Schedulers side by side: same executor, same trace, same arrivals.

All contestants share one executor, so they differ in scheduling and in nothing else, and take turns within every
load, in changing order, so that a machine whose speed drifts does not decide. Each pass has a new pool: nobody finds
the pages of an earlier pass.
"""

import argparse
import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from orca_jax.bench.load_plot import plot_loads
from orca_jax.bench.measure import mean_figures, reschedule, run_workload, summarize
from orca_jax.bench.workload.generate import WorkloadRequest, add_workload_args, workload_from_args, workload_settings
from orca_jax.build.engine import Built, build_engine
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError
from orca_jax.flags import add_engine_args, engine_config_from_args
from orca_jax.reporting import hardware

HELP = "schedulers side by side, over a sweep of arrival rates"
DEFAULT = ("request_level", "orca", "chunked")
MAY_DIFFER = (
    "scheduler", "scheduling_policy", "overlap", "check_in_intervals", "enable_prefix_caching",
    "max_num_batched_tokens", "n_slots",
)  # fmt: skip
COLUMNS = {
    "output_tokens_per_s": "tokens/s",
    "requests_per_s": "requests/s",
    "median_normalized_latency_ms": "median norm. latency",
    "p99_normalized_latency_ms": "p99 norm. latency",
    "p99_ttft_ms": "p99 TTFT",
    "median_itl_ms": "median ITL",
    "p99_itl_ms": "p99 ITL",
}

Figures = Mapping[str, float]


@dataclass(frozen=True)
class LoadResult:
    """One arrival rate, and what each contestant made of it."""

    load: float | None  # times what the first contestant can serve; None: all at once
    rate: float | None  # requests per second
    results: Mapping[str, Figures]  # by contestant, the mean of its passes


def add_args(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark and of the engine."""
    add_workload_args(parser)
    parser.add_argument(
        "--schedulers", nargs="+", default=list(DEFAULT), metavar="'NAME [FLAGS]'",
        help="who takes part, each a name with flags of its own such as 'chunked --max-num-batched-tokens 256'; the "
        f"first one's throughput is the measure of --load (default: {' '.join(DEFAULT)})",
    )  # fmt: skip
    parser.add_argument(
        "--load", type=float, nargs="*", default=[1.1], metavar="X",
        help="arrival rates, as multiples of what the first scheduler can serve (default: 1.1)",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="passes of each, averaged (default: 1)")
    parser.add_argument("--plot", metavar="FILE", help="draw latencies over rates to a .png or .svg")
    add_engine_args(parser, model="preset:gpt2", max_num_seqs=16)


def run(args: argparse.Namespace) -> None:
    """Find the first contestant's saturation with all requests at once, then offer multiples of it to all."""
    if args.repeat < 1 or any(load <= 0 for load in args.load):
        raise ConfigError("repeat must be at least 1 and every load above 0", param="repeat")
    config = engine_config_from_args(args)
    contestants = parse_contestants(args.schedulers, config)
    with build_engine(_shared(config, contestants.values())) as built:
        _touch(built, _trace(built, args, None))
        loads = [_measure(built, contestants, args, None, None)]
        capacity = loads[0].results[args.schedulers[0]]["requests_per_s"]
        loads += [_measure(built, contestants, args, load, load * capacity) for load in args.load]
    if args.plot is not None:
        plot_loads(args.plot, loads, f"{config.model}, {args.num_requests} requests of {args.trace}")
    settings = {**dataclasses.asdict(config), **workload_settings(args), "load": args.load, "repeat": args.repeat}
    line = {"capacity_requests_per_s": capacity, "loads": [dataclasses.asdict(load) for load in loads]}
    print(json.dumps({**line, "hardware": hardware(), "config": settings}))


def parse_contestants(words: Sequence[str], config: EngineConfig) -> dict[str, EngineConfig]:
    """Each contestant's settings: those of `config`, but for the flags that stand beside its name.

    Raises:
        ConfigError: a flag is unknown or not a scheduler's, or somebody takes part twice.
    """
    parser = _ContestantParser(prog="--schedulers", add_help=False)
    add_engine_args(parser, **dataclasses.asdict(config))
    contestants = {}
    for text in words:
        theirs = engine_config_from_args(parser.parse_args(["--scheduler", *shlex.split(text)]))
        changed = [f.name for f in dataclasses.fields(config) if getattr(theirs, f.name) != getattr(config, f.name)]
        for name in changed:
            if name not in MAY_DIFFER:
                raise ConfigError(f"{text!r}: all contestants share {name}; say it once, outside", param="schedulers")
        contestants[text] = theirs
    if len(contestants) < len(words):
        raise ConfigError("a scheduler takes part twice", param="schedulers")
    return contestants


def _shared(config: EngineConfig, contestants: Iterable[EngineConfig]) -> EngineConfig:
    """What the one executor is built for. Where a contestant has it repeat, its largest launch is `chunked`'s."""
    intervals = [each.check_in_intervals for each in contestants if each.check_in_intervals]
    if not intervals:
        return dataclasses.replace(config, scheduler="orca")
    return dataclasses.replace(config, scheduler="chunked", overlap=False, check_in_intervals=max(intervals, key=max))


class _ContestantParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--schedulers: {message}", param="schedulers")


def _trace(built: Built, args: argparse.Namespace, rate: float | None) -> list[WorkloadRequest]:
    vocab_size = built.model_config.vocab_size
    return workload_from_args(args, vocab_size=vocab_size, max_model_len=built.max_model_len, rate=rate)


def _touch(built: Built, trace: Sequence[WorkloadRequest]) -> None:
    """Fill as many rows as there are, so that no pass is the first to use programs and memory."""
    rows = built.engine.pool.kv.num_rows
    run_workload(built.engine, [WorkloadRequest(0.0, request.prompt_ids, 2) for request in trace[:rows]])


def _measure(
    built: Built,
    contestants: Mapping[str, EngineConfig],
    args: argparse.Namespace,
    load: float | None,
    rate: float | None,
) -> LoadResult:
    trace = _trace(built, args, rate)
    passes: dict[str, list[Figures]] = {name: [] for name in contestants}
    order = list(contestants)
    for _ in range(args.repeat):
        for name in order:
            reschedule(built, contestants[name])
            passes[name].append(summarize(run_workload(built.engine, trace)))
        order.reverse()
    result = LoadResult(load, rate, {name: mean_figures(figures) for name, figures in passes.items()})
    _print(result)
    return result


def _print(load: LoadResult) -> None:
    """A line for each contestant; times in milliseconds."""
    title = "all at once" if load.rate is None else f"{load.load:g} x saturation, {load.rate:.3g} requests/s"
    width = max(map(len, load.results))
    print(f"{title}\n  {'':<{width}}  " + "  ".join(COLUMNS.values()))
    for name, figures in load.results.items():
        cells = [f"{figures[column]:>{len(head)},.4g}" for column, head in COLUMNS.items()]
        print(f"  {name:<{width}}  " + "  ".join(cells), flush=True)
