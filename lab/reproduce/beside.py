"""Rows of the paper's figures from measured kernels, beside those of the fitted numbers and of the paper."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.pages.markdown import escaped, table
from lab.paper.effort import Effort
from lab.paper.fits import Fit
from lab.paper.kernels import KernelSource
from lab.paper.places import Place
from lab.paper.points import read_figure_10
from lab.paper.sweep import Curve, paper_curve
from lab.reproduce import fig9, fig10, fig11, table1
from lab.reproduce.rows import Row, shown
from orca_jax.tools.plan.timing import KernelTimes, kernel_times

RESULTS = Path(__file__).parents[1] / "results"
FIGURES = ("fig9", "fig10", "fig11", "table1")

type CurvesByModel = Mapping[str, Mapping[str, Curve]]


def all_rows(source: KernelSource, fit: Fit, curves: CurvesByModel, effort: Effort) -> list[Row]:
    """The rows of Figures 9 to 11 and of Table 1.

    Args:
        source: the tables, and what is assumed about the engine.
        fit: without fitted numbers.
        curves: those of ORCA, by model and system.
        effort: the number of requests.
    """
    rows = fig9.rows_of(fig9.all_times(fit, source))
    paper = read_figure_10()
    every = {}
    for model, known in curves.items():
        names = [name for name in paper[model] if name not in known]
        place = Place(model, fit=fit, kernels=source)
        columns = ([place] * len(names), [effort] * len(names))
        found = effort.map(paper_curve, names, *columns)
        every[model] = {**known, **dict(zip(names, found, strict=True))}
        rows += fig10.errors(model, every[model], paper)
    rows += fig10.saturations(every, paper)
    rows += fig11.rows_of(fig11.saturations(Place(fit=fit, kernels=source), effort))
    return rows + table1.reproduced(_plan_times(source))[1]


def _plan_times(source: KernelSource) -> KernelTimes | None:
    """The times of the planner for the paper's card."""
    flag = f"tables:{source.folder},source={source.source},bandwidth={source.bandwidth},sums=nccl"
    return kernel_times(flag, "a100-80")


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows beside those of the fitted numbers, in Markdown."""
    fitted: dict[str, Mapping[str, Any]] = {}
    for figure in FIGURES:
        text = (RESULTS / f"{figure}-full.json").read_text(encoding="utf-8")
        fitted |= json.loads(text)["rows"]
    lines = []
    for row in rows:
        values = [row["ours"], fitted[row["name"]]["ours"], row["paper"]]
        lines.append([row["name"], escaped(row["text"]), *map(shown, values)])
    return table(["row", "value", "from tables", "fitted", "paper"], lines)
