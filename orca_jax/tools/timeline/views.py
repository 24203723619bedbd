"""The output files of the views of a timeline: a picture, an HTML page, and trace events."""

import argparse
import json
import os
from collections.abc import Sequence

from orca_jax.flags.needs import check_needs
from orca_jax.helpers.reporting import NO_MATPLOTLIB, write_file
from orca_jax.timeline.html import html_page
from orca_jax.timeline.measure import Timeline
from orca_jax.tools.timeline.perfetto import perfetto
from orca_jax.values.errors import ConfigError, reason_of


def write_views(
    timeline: Timeline, args: argparse.Namespace, other: Timeline | None = None
) -> None:
    """Write the views selected by the flags; `other` is beside the timeline in its page and its picture.

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
        _write_text(args.html, html_page(timeline, other), "html")
    write_plot([timeline] if other is None else [timeline, other], args)


def write_plot(timelines: Sequence[Timeline], args: argparse.Namespace) -> None:
    """Draw timelines below each other, if `--plot` is given.

    Raises:
        ConfigError: the file cannot be written, or matplotlib is missing; `param` is "plot".
    """
    check_needs(
        "timeline, bench burst, bench replay",
        args,
        () if args.plot_unit is None else ("plot_unit",),
    )
    if args.plot is None:
        return
    try:
        from orca_jax.tools.timeline.plot import draw_timelines, save_figure, title
    except ModuleNotFoundError as error:
        raise ConfigError(NO_MATPLOTLIB, param="plot") from error
    named = {
        title(each, timelines[index - 1] if index else None): each
        for index, each in enumerate(timelines)
    }
    save_figure(draw_timelines(named, args.plot_unit or "iterations"), args.plot)


def _write_text(path: str, text: str, param: str) -> None:
    try:
        write_file(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path!r} cannot be written: {reason_of(error)}", param=param) from error
