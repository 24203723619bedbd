"""The flags and output files of the views of a timeline: a picture, an HTML page, and trace events."""

import argparse
import json
import os
from collections.abc import Sequence

from orca_jax.errors import ConfigError
from orca_jax.reporting import NO_MATPLOTLIB, write_file
from orca_jax.timeline.html import html_page
from orca_jax.timeline.perfetto import perfetto
from orca_jax.timeline.read import Timeline


def add_file_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the file to read and of the views to write."""
    parser.add_argument("file", metavar="FILE", help="timeline written by --trace-file; of several, the last one")
    parser.add_argument("--perfetto", metavar="OUT", help="write trace events for ui.perfetto.dev or chrome://tracing")
    parser.add_argument("--html", metavar="OUT", help="write an HTML page with the requests of each iteration")
    add_plot_args(parser)


def add_plot_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the picture and of the unit of its axis."""
    parser.add_argument("--plot", metavar="OUT", help="draw the timeline to a .png or .svg file")
    parser.add_argument(
        "--plot-unit",
        choices=("iterations", "seconds"),
        help="unit of the axis of --plot (default: iterations)",
    )


def write_views(timeline: Timeline, args: argparse.Namespace) -> None:
    """Write the views selected by the flags.

    Raises:
        ConfigError: a file cannot be written, or matplotlib is missing; `param` is the flag.
    """
    for param in ("perfetto", "html", "plot"):
        path = getattr(args, param)
        if path is not None and os.path.realpath(path) == os.path.realpath(args.file):
            raise ConfigError(f"{path!r} is the timeline itself; choose another file", param=param)
    if args.perfetto is not None:
        _write_text(args.perfetto, json.dumps(perfetto(timeline)), "perfetto")
    if args.html is not None:
        _write_text(args.html, html_page(timeline), "html")
    write_plot([timeline], args)


def write_plot(timelines: Sequence[Timeline], args: argparse.Namespace) -> None:
    """Draw timelines below each other, if `--plot` is given.

    Raises:
        ConfigError: the file cannot be written, or matplotlib is missing; `param` is "plot".
    """
    if args.plot is None and args.plot_unit is not None:
        raise ConfigError("plot_unit has no effect without --plot; give both", param="plot_unit")
    if args.plot is None:
        return
    try:
        from orca_jax.timeline.plot import draw_timelines, save_figure, title
    except ModuleNotFoundError as error:
        raise ConfigError(NO_MATPLOTLIB, param="plot") from error
    named = {title(each, timelines[index - 1] if index else None): each for index, each in enumerate(timelines)}
    save_figure(draw_timelines(named, args.plot_unit or "iterations"), args.plot)


def _write_text(path: str, text: str, param: str) -> None:
    try:
        write_file(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be written: {error.strerror}", param=param) from error
