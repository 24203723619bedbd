"""`python -m orca_jax.trace FILE` shows what an engine wrote with `--trace-file`; `replay FILE` runs it again.

`burst` runs requests of mixed lengths that arrive at once, under request-level scheduling and the one that is named.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_type_hints

from orca_jax.bench.measure import cpu_name, hardware, print_table
from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError, OrcaError
from orca_jax.serve.engine_args import HELP, add_engine_args, engine_config_from_args, options_for
from orca_jax.trace.burst import mixed_burst, run_burst
from orca_jax.trace.fit import fit_cost
from orca_jax.trace.page import page
from orca_jax.trace.perfetto import perfetto
from orca_jax.trace.replay import replay
from orca_jax.trace.run import Run, figures, load_run

REPLAY_FLAGS = (
    "scheduler", "scheduling_policy", "length_predictor", "max_num_seqs", "max_num_batched_tokens", "overlap",
    "check_in_intervals", "enable_prefix_caching", "n_workers", "n_slots", "num_pages",
)  # fmt: skip
REPLAY_HELP = (
    "Runs the recorded arrivals through a scheduler on a virtual clock. An iteration costs what a line fitted to the "
    "recorded ones says, by tokens (padding included) and by pairs of tokens in attention. Every flag is as recorded "
    'where it is not given; the length predictor may also be "oracle", which knows what the trace knows.'
)

BURST_HELP = (
    "Runs one burst of requests of mixed lengths under request-level scheduling, then under --scheduler, and shows "
    "what each came to. Nothing ends before its length; random ids stand for text."
)


def main(argv: list[str] | None = None) -> int:
    """Show or replay; 2 where a flag or the file is wrong."""
    words = sys.argv[1:] if argv is None else argv
    try:
        if words[:1] == ["replay"]:
            _replay(words[1:])
        elif words[:1] == ["burst"]:
            _burst(words[1:])
        else:
            _show(words)
    except OrcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _show(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m orca_jax.trace", description=__doc__)
    _add_files(parser)
    args = parser.parse_args(words)
    run = load_run(args.file)
    shown = figures(run)
    _draw(run, args)
    print_table(f"{args.file}: {run.head.config.model}, {run.head.config.scheduler}", shown)
    print(json.dumps({**shown, "config": dataclasses.asdict(run.head.config), "trace": args.file}))


def _replay(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m orca_jax.trace replay", description=REPLAY_HELP)
    _add_files(parser)
    hints = get_type_hints(EngineConfig)
    for name in REPLAY_FLAGS:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=HELP[name], **options_for(hints[name]))
    args = parser.parse_args(words)
    run = load_run(args.file)
    fit = fit_cost(run)
    changes = {name: getattr(args, name) for name in REPLAY_FLAGS if hasattr(args, name)}
    again = replay(run, dataclasses.replace(run.head.config, **changes), fit.cost)
    _draw(again, args)
    recorded, replayed = figures(run), figures(again)
    cost = {name: value for name, value in dataclasses.asdict(fit.cost).items() if name != "buckets"}
    print_table("fitted cost in seconds", {**cost, "r_squared": fit.r_squared})
    print_table(f"{'recorded, then replayed with':<28} {changes or 'nothing changed'}", _columns(recorded, replayed))
    line = {
        "recorded": recorded,
        "replayed": replayed,
        "fit": {**cost, "r_squared": fit.r_squared},
        "config": dataclasses.asdict(again.head.config),
        "trace": args.file,
        "hardware": {"cpu": cpu_name(), "cores": os.cpu_count()},  # of the replay; its figures do not depend on it
    }
    print(json.dumps(line))


def _burst(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m orca_jax.trace burst", description=BURST_HELP)
    parser.add_argument("--num-requests", type=int, default=16, metavar="N", help="how many (default: 16)")
    for name, bounds, what in (("prompt", (4, 24), "of a prompt"), ("output", (2, 40), "that are generated")):
        parser.add_argument(
            f"--{name}-tokens", type=int, nargs=2, default=bounds, metavar=("LOW", "HIGH"),
            help=f"tokens {what}, uniform between both (default: {bounds[0]} {bounds[1]})",
        )  # fmt: skip
    _add_plot(parser)
    add_engine_args(parser, scheduler="orca", max_num_seqs=4, max_num_batched_tokens=128)
    args = parser.parse_args(words)
    config = engine_config_from_args(args)
    prompt, output = tuple(args.prompt_tokens), tuple(args.output_tokens)
    burst = mixed_burst(args.num_requests, prompt_tokens=prompt, output_tokens=output, seed=config.seed)
    runs = run_burst(config, burst, ("request_level", config.scheduler))
    _plot(list(runs.values()), args)
    for name, run in runs.items():
        print_table(name, figures(run))
    line = {name: figures(run) for name, run in runs.items()}
    print(json.dumps({**line, "config": dataclasses.asdict(config), "hardware": hardware()}))


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what --trace-file has written; its last run counts")
    parser.add_argument("--perfetto", metavar="OUT", help="write trace events, for ui.perfetto.dev or chrome://tracing")
    parser.add_argument("--html", metavar="OUT", help="write a timeline: who sat in which iteration")
    _add_plot(parser)


def _add_plot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", metavar="OUT", help="write the timeline as a picture, .png or .svg")
    parser.add_argument(
        "--plot-unit", choices=("iterations", "seconds"), default="iterations", help="of the picture's axis"
    )


def _draw(run: Run, args: argparse.Namespace) -> None:
    if args.perfetto is not None:
        _write(args.perfetto, json.dumps(perfetto(run)), "perfetto")
    if args.html is not None:
        _write(args.html, page(run), "html")
    _plot([run], args)


def _plot(runs: Sequence[Run], args: argparse.Namespace) -> None:
    if args.plot is None:
        return
    try:
        from orca_jax.trace.plot import draw_timelines, save_figure, title
    except ModuleNotFoundError as error:
        raise ConfigError("plot needs matplotlib: pip install 'orca-jax[plot]'", param="plot") from error
    save_figure(draw_timelines({title(run): run for run in runs}, args.plot_unit), args.plot)


def _write(path: str, text: str, param: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be written: {error.strerror}", param=param) from error


def _columns(recorded: Mapping[str, float], replayed: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{recorded[name]:>12,.4g} {replayed[name]:>12,.4g}" for name in recorded}


if __name__ == "__main__":
    sys.exit(main())
