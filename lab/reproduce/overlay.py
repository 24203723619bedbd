"""Draw every figure over the paper's points on one page, from the recorded results.

Blue and orange are fitted, green is held out, purple is not fitted at all; grey circles are the paper's.
"""

import argparse
import json
from collections.abc import Mapping
from itertools import chain, product
from typing import Any

from lab.pages.command import ROOT
from lab.paper.pipeline import stage_times
from lab.paper.points import read_figure_10
from lab.paper.stages_plot import plot_stages
from orca_jax.helpers.reporting import new_figure, save_plot, use_plain_numbers
from orca_jax.timeline.palette import DASHES, OTHERS, SCHEDULERS

FILE = ROOT / "docs" / "reproduction.svg"
STAGES = ROOT / "docs" / "paper-fig8.svg"
RESULTS = ROOT / "lab" / "results"
ORCA = SCHEDULERS["orca"].color
FT = SCHEDULERS["request_level"].color
KINDS = {"held out": SCHEDULERS["chunked"].color, "unfitted": OTHERS[0]}
POINTS = {"c": "#555555", "s": 18, "alpha": 0.55, "linewidths": 0, "zorder": 3}


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "--form", choices=("full", "quick"), default="full", help="results to draw (default: full)"
    )


def run(args: argparse.Namespace) -> int:
    """Draw the page, and the batches on the stages of Figure 8."""
    draw({name: read(name, args.form) for name in ("fig8", "fig9", "fig10", "fig11")}, str(FILE))
    plot_stages(str(STAGES), stage_times())
    return 0


def read(name: str, form: str = "full") -> dict[str, Any]:
    """The recorded results of a figure."""
    found: dict[str, Any] = json.loads(
        (RESULTS / f"{name}-{form}.json").read_text(encoding="utf-8")
    )
    return found


def draw(found: Mapping[str, Any], path: str) -> None:
    """Draw Figure 10 in the first row, its predictions and Figure 9b in the second, Figures 8 and 11 in the third."""
    figure = new_figure(10.5, 11.0)
    panels = figure.subplots(3, 3)
    paper = read_figure_10()
    curves = found["fig10"]["curves"]
    for axes, (model, systems) in zip(panels[0], curves["fitted"].items(), strict=True):
        _latencies(axes, f"Figure 10, {model}: fitted", systems, paper[model])
    for axes, (kind, color) in zip(panels[1], KINDS.items(), strict=False):
        _latencies(axes, f"Figure 10, 175B: {kind}", curves[kind]["175B"], paper["175B"], color)
    _batches(panels[1][2], found["fig9"])
    _stages(panels[2][0], found["fig8"]["gain"])
    for axes, (kind, each) in zip(panels[2][1:], found["fig11"]["curves"].items(), strict=True):
        _equal(axes, kind, each)
    lines = panels[0][0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=4)
    save_plot(figure, path)


def _style(names: list[str], name: str, color: str | None) -> dict[str, Any]:
    own = ORCA if name.startswith("orca") else FT
    family = [each for each in names if each[:2] == name[:2]]
    return {
        "color": color or own,
        "linestyle": DASHES[family.index(name) % len(DASHES)],
        "linewidth": 1.3,
    }


def _latencies(
    axes: Any, title: str, systems: Mapping[str, Any], paper: Any, color: str | None = None
) -> None:
    for name, curve in systems.items():
        axes.plot(
            *zip(*curve["points"], strict=True), label=name, **_style(list(systems), name, color)
        )
    points = chain.from_iterable(paper[name] for name in systems)
    axes.scatter(*zip(*points, strict=True), label="the paper, read off", **POINTS)
    axes.set(
        title=title,
        xlabel="requests/s",
        ylabel="median ms per token",
        yscale="log",
        ylim=(25, 2500),
    )
    axes.set_xlim(left=0)
    use_plain_numbers(axes.yaxis)
    axes.grid(visible=True, alpha=0.25)


def _batches(axes: Any, found: Mapping[str, Any]) -> None:
    times = found["batch_ms"]["9b"]
    for name, ours in times.items():
        known = [
            (size, ms)
            for size, ms in zip(found["batch_sizes"], ours, strict=True)
            if ms is not None
        ]
        axes.plot(*zip(*known, strict=True), label=name, **_style(list(times), name, None))
        points = list(zip(found["batch_sizes"], found["paper_9b_ms"][name], strict=False))
        axes.scatter(*zip(*points, strict=True), **POINTS)
    axes.set(
        title="Figure 9b, 101B: fitted", xlabel="batch size", ylabel="ms of a batch", xscale="log"
    )
    axes.set_xticks(found["batch_sizes"], found["batch_sizes"])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)


def _stages(axes: Any, gain: Mapping[str, Any]) -> None:
    names = list(product(gain, ("orca", "ft")))
    heights = [gain[workload][name]["4"] for workload, name in names]
    colors = [ORCA if name == "orca" else FT for _, name in names]
    axes.bar(range(len(names)), heights, color=colors)
    axes.set_xticks(
        range(len(names)), [f"{name}\n{workload}" for workload, name in names], fontsize=7
    )
    axes.set(title="Figure 8, 341B: 4 batches in flight", ylabel="throughput, 1 = one batch")


def _equal(axes: Any, kind: str, curves: Mapping[str, Any]) -> None:
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name, **_style(list(curves), name, None))
    axes.set(title=f"Figure 11, 175B: {kind}", xlabel="requests/s", ylabel="median s", yscale="log")
    axes.set_xlim(left=0)
    use_plain_numbers(axes.yaxis)
    axes.grid(visible=True, alpha=0.25)
    axes.legend(fontsize=6)
