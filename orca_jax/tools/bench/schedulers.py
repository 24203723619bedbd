"""Compare schedulers: same executor, same workload, same arrivals.

All contestants share one executor, so they differ in scheduling only. They take turns within every load, in changing
order, so that drifts in the speed of the machine do not decide the result. Each pass has a new pool, without cached
pages of an earlier pass.
"""

import argparse
import dataclasses
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from orca_jax.assembly.built import Built
from orca_jax.assembly.engine import build_engine
from orca_jax.assembly.support import NEEDS, adapted, check_settings
from orca_jax.flags import FlagParser, add_engine_args, add_number, engine_config_from_args
from orca_jax.flags.needs import check_needs
from orca_jax.helpers.reporting import hardware, p99_name
from orca_jax.timeline.palette import in_order
from orca_jax.tools.bench.load_plot import plot_loads
from orca_jax.tools.bench.measure import mean_figures, reschedule, run_workload, summarize
from orca_jax.tools.bench.workload.generate import (
    WorkloadRequest,
    add_workload_args,
    workload_from_args,
    workload_settings,
)
from orca_jax.values.checks import json_value
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError

DEFAULT = ("request_level", "orca", "chunked")
MAY_DIFFER = (
    "scheduler", "scheduling_policy", "overlap", "check_in_interval", "enable_prefix_caching",
    "max_num_batched_tokens", "itl_target_ms", "n_slots",
)  # fmt: skip
COLUMNS = {
    "output_tokens_per_s": "tokens/s",
    "requests_per_s": "requests/s",
    "median_normalized_latency_ms": "median norm. latency",
    "p99_normalized_latency_ms": "{tail} norm. latency",
    "p99_ttft_ms": "{tail} TTFT",
    "median_itl_ms": "median ITL",
    "p99_itl_ms": "{gap_tail} ITL",
}
"""Titles of columns by figure; `tail` and `gap_tail` are the names of a 99th percentile of requests and of gaps."""

Figures = Mapping[str, float]


@dataclass(frozen=True)
class LoadResult:
    """One arrival rate with the results of each contestant."""

    load: float | None  # multiple of the capacity of the first contestant; None: all at once
    rate: float | None  # requests per second
    results: Mapping[str, Figures]  # by contestant, the mean of its passes


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark and of the engine."""
    add_workload_args(parser)
    parser.add_argument(
        "--schedulers", nargs="+", default=list(DEFAULT), metavar="'NAME [FLAGS]'",
        help="contestants: names of schedulers, with flags if needed, such as 'chunked --max-num-batched-tokens 256'; "
        f"--load is relative to the throughput of the first one (default: {' '.join(DEFAULT)})",
    )  # fmt: skip
    add_number(
        parser,
        "--load",
        [1.1],
        "arrival rates, as multiples of the capacity of the first scheduler",
        nargs="*",
        metavar="X",
    )
    add_number(parser, "--repeat", 1, "passes per contestant, averaged")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="draw throughput and latencies over rates to a .png or .svg file",
    )
    parser.add_argument(
        "--redraw",
        metavar="FILE",
        help="only draw --plot again, from the line of JSON of an earlier run in a file",
    )
    # --schedulers names the schedulers; and a timeline would mix the requests of their pools.
    own = ("scheduler", "trace_file")
    add_engine_args(parser, without=own, has_word=True, model="preset:gpt2", max_num_seqs=16)


def run(args: argparse.Namespace) -> None:
    """Measure the capacity of the first contestant with all requests at once, then all contestants at multiples of it.

    Raises:
        ConfigError: a setting is wrong; `param` names it.
    """
    check_needs(
        "bench schedulers",
        args,
        [name for name in ("redraw", "plot") if getattr(args, name) is not None],
    )
    if args.redraw is not None:
        _redraw(args.redraw, args.plot)
        return
    if args.repeat < 1 or any(load <= 0 for load in args.load):
        raise ConfigError("repeat must be at least 1 and every load above 0", param="repeat")
    config = engine_config_from_args(args)
    contestants = parse_contestants(args.schedulers, config)
    with build_engine(_shared(config)) as built:
        _warm_up(built, _workload(built, args, None))
        loads = [_measure(built, contestants, args, None, None)]
        capacity = loads[0].results[args.schedulers[0]]["requests_per_s"]
        loads += [_measure(built, contestants, args, load, load * capacity) for load in args.load]
    settings = {
        **dataclasses.asdict(config),
        **workload_settings(args),
        "load": args.load,
        "repeat": args.repeat,
    }
    line = {
        "capacity_requests_per_s": capacity,
        "loads": [dataclasses.asdict(load) for load in loads],
    }
    print(json.dumps({**line, "hardware": hardware(), "config": settings}), flush=True)
    if args.plot is not None:  # at the end: a plot that fails loses no figure
        _plot(args.plot, loads, settings)


def _plot(path: str, loads: Sequence[LoadResult], settings: Mapping[str, Any]) -> None:
    count = settings["num_requests"]
    plot_loads(
        path,
        loads,
        f"{settings['model']}, {count} requests of the workload “{settings['trace']}”",
        count,
    )


def _redraw(file: str, plot: str) -> None:
    try:
        line = json_value(Path(file).read_text(encoding="utf-8"))
        loads = [LoadResult(each["load"], each["rate"], each["results"]) for each in line["loads"]]
        settings = {name: line["config"][name] for name in ("model", "num_requests", "trace")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{file!r} is not a line of JSON of this command: {type(error).__name__}: {error}"
        raise ConfigError(message, param="redraw") from error
    _plot(plot, loads, settings)
    print(json.dumps({"redrawn": plot}))


def parse_contestants(words: Sequence[str], config: EngineConfig) -> dict[str, EngineConfig]:
    """Return the settings of each contestant: those of `config`, changed by the flags beside its name.

    Raises:
        ConfigError: a flag is unknown or not about scheduling, or a contestant is named twice.
    """
    parser = _ContestantParser(prog="--schedulers", add_help=False)
    add_engine_args(parser, **dataclasses.asdict(config))
    contestants = {}
    for text in words:
        flags = ["--scheduler", *shlex.split(text)]
        theirs = adapted(engine_config_from_args(parser.parse_args(flags)), parser.given(flags))
        for name in sorted(parser.given(flags)):
            if name not in MAY_DIFFER and getattr(theirs, name) != getattr(config, name):
                raise ConfigError(
                    f"{text!r}: all contestants share {name}; set it outside of --schedulers",
                    param="schedulers",
                )
        check_settings(theirs)
        contestants[text] = theirs
    if len(contestants) < len(words):
        raise ConfigError("--schedulers names a contestant twice", param="schedulers")
    _check_used(config, contestants.values())
    return contestants


def _check_used(config: EngineConfig, contestants: Iterable[EngineConfig]) -> None:
    """Refuse a setting for all contestants that none of them can honour."""
    rows = [need for need in NEEDS if need.moment == "settings"]
    for name in {
        need.setting for need in rows if getattr(config, need.setting) not in need.without_effect
    }:
        if all(getattr(each, name) != getattr(config, name) for each in contestants):
            raise ConfigError(
                f"{name} has no effect on any of --schedulers; leave it out", param=name
            )


def _shared(config: EngineConfig) -> EngineConfig:
    """Return the settings of the shared executor."""
    return adapted(dataclasses.replace(config, scheduler="orca"))


class _ContestantParser(FlagParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"--schedulers: {self.hinted(message)}", param="schedulers")


def _workload(built: Built, args: argparse.Namespace, rate: float | None) -> list[WorkloadRequest]:
    vocab_size = built.model_config.vocab_size
    return workload_from_args(
        args, vocab_size=vocab_size, max_model_len=built.max_model_len, rate=rate
    )


def _warm_up(built: Built, workload: Sequence[WorkloadRequest]) -> None:
    """Fill all rows once, so that no pass is the first to use programs and memory."""
    rows = built.engine.pool.kv.num_rows
    run_workload(
        built.engine, [WorkloadRequest(0.0, request.prompt_ids, 2) for request in workload[:rows]]
    )


def _measure(
    built: Built,
    contestants: Mapping[str, EngineConfig],
    args: argparse.Namespace,
    load: float | None,
    rate: float | None,
) -> LoadResult:
    workload = _workload(built, args, rate)
    passes: dict[str, list[Figures]] = {name: [] for name in contestants}
    order = list(contestants)
    for _ in range(args.repeat):
        for name in order:
            reschedule(built, contestants[name])
            passes[name].append(summarize(run_workload(built.engine, workload)))
        order.reverse()
    result = LoadResult(
        load, rate, {name: mean_figures(figures) for name, figures in passes.items()}
    )
    _print(result, workload)
    return result


def _print(load: LoadResult, workload: Sequence[WorkloadRequest]) -> None:
    """Print a line per contestant; times are in milliseconds."""
    count = len(workload)
    tails = {
        "tail": p99_name(count),
        "gap_tail": p99_name(sum(each.num_output - 1 for each in workload)),
    }
    heads = {name: head.format(**tails) for name, head in COLUMNS.items()}
    title = (
        "all at once"
        if load.rate is None
        else f"{load.load:g} x saturation, {load.rate:.3g} requests/s"
    )
    width = max(map(len, load.results))
    print(f"{title}\n  {'':<{width}}  " + "  ".join(heads.values()))
    for name in in_order(load.results):
        cells = [f"{load.results[name][column]:>{len(head)},.4g}" for column, head in heads.items()]
        print(f"  {name:<{width}}  " + "  ".join(cells), flush=True)
