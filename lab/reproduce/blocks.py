"""Blocks of Markdown for the pages, from the recorded results of `python -m lab reproduce`."""

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

from lab.pages.markdown import table
from lab.paper.beyond import COLUMNS
from lab.paper.points import DIGITISING, largest, read_figure_10
from lab.reproduce.rows import shown as printed

RESULTS = Path(__file__).parents[1] / "results"
FIGURES = ("fig8", "fig9", "fig10", "fig11", "table1")
LATER = ("stability", "mc_sf", "vtc", "k_lpm", "ratios")
"""Later papers, recorded in the quick form, or in both."""
REASONS = ("stability", "optimum", "fairness", "prefixes", "ratios")
"""Modules of the shelf whose docstrings say what was run instead of the papers' testbeds."""
MODELS = ("101B", "175B", "341B")
ENGINES = {"orca": "ORCA", "ft": "FasterTransformer"}


def claims() -> str:
    """A row for each comparison that belongs to a claim."""
    rows = sorted((row for row in recorded() if row["claim"]), key=lambda row: row["claim"])
    cells = [
        (row["claim"], row["text"], shown(row["ours"]), shown(row["paper"]), percent(row["error"]),
         percent(row["limit"]), f"**{row['verdict']}**")
        for row in rows
    ]  # fmt: skip
    return table(("claim", "value", "ours", "the paper", "error", "tolerance", "verdict"), cells)


def errors() -> str:
    """The errors of latency by model and engine: fitted, held out, unfitted."""
    by_name = {row["name"]: row for row in recorded()}
    cells = []
    for engine, title in ENGINES.items():
        for what, words in (
            ("latency", "within the error of digitising"),
            ("strict", "without tolerance"),
        ):
            rows = [by_name[f"fig10.{model}.{engine}.{what}"] for model in MODELS]
            limits = [percent(row["limit"]) for row in rows]
            cells.append(
                (
                    f"{title}, {words}",
                    *[percent(row["ours"]) for row in rows],
                    ", ".join(filter(None, limits)),
                )
            )
        for kind in ("held_out", "unfitted"):
            row = by_name[f"fig10.175B.{engine}.{kind}"]
            cells.append(
                (
                    f"{title}, {kind.replace('_', ' ')}",
                    "",
                    percent(row["ours"]),
                    "",
                    percent(row["limit"]),
                )
            )
    cells += _digitising()
    for name in ("mean", "worst"):
        row = by_name[f"fig10.saturation.{name}"]
        cells.append(
            (f"saturation of all, {name}", "", percent(row["error"]), "", percent(row["limit"]))
        )
    return table(("mean error", *MODELS, "tolerance"), cells)


def _digitising() -> list[tuple[str, ...]]:
    """The error of digitising as a share of the largest throughput that the paper's figure has for an engine."""
    paper = read_figure_10()
    cells = []
    for engine, title in ENGINES.items():
        shares = []
        for model in MODELS:
            tops = [
                largest(points) for name, points in paper[model].items() if name.startswith(engine)
            ]
            shares.append(percent(DIGITISING / max(tops)))
        text = (
            f"{title}: the error of digitising, {DIGITISING} requests/s, of the axis of its curves"
        )
        cells.append((text, *shares, ""))
    return cells


def what_if() -> str:
    """The errors of ORCA's latency and saturation with other numbers."""
    found = json.loads((RESULTS / "what-if.json").read_text(encoding="utf-8"))["table"]
    cells = []
    for name, each in found.items():
        latency = [percent(each[model]["latency"]) for model in MODELS]
        saturation = [percent(each[model]["saturation"]) for model in MODELS]
        cells.append((name, *latency, *saturation))
    return table(
        ("ORCA with", *[f"{m}, latency" for m in MODELS], *[f"{m}, saturation" for m in MODELS]),
        cells,
    )


def beyond() -> str:
    """The studies beyond the paper's figures."""
    found = json.loads((RESULTS / "beyond.json").read_text(encoding="utf-8"))
    columns = {name: title for name, title in COLUMNS.items() if name != "arrivals_per_s"}
    cells = []
    for study, figures in found.items():
        shown = [f"{figures[name]:,.4g}" if name in figures else "" for name in columns]
        cells.append((study, *shown))
    return table(("", *columns.values()), cells)


def later() -> str:
    """The rows of later papers, and why they differ."""
    rows = {row["name"]: row for row in chain(recorded("quick"), recorded("full"))}
    cells = [
        (row["text"], printed(row["ours"]), printed(row["paper"]), f"**{row['verdict']}**")
        for row in rows.values()
        if row["name"].startswith(LATER)
    ]
    about = (
        "## What the papers measured\n\n`python -m lab reproduce NAME --quick` gives these rows, without the papers' "
        f"testbeds; the names are {', '.join(f'`{name}`' for name in LATER)}. Those of `mc_sf` are recorded without "
        "`--quick`.\n\n"
    )
    reasons = [(import_module(f"lab.shelf.{name}").__doc__ or "").strip() for name in REASONS]
    parts = ["### What was run, and why it differs", *reasons]
    return (
        about
        + table(("value", "ours", "the paper", "verdict"), cells)
        + "\n"
        + "\n\n".join(parts)
        + "\n"
    )


def recorded(form: str = "full") -> Iterator[Mapping[str, Any]]:
    """The rows of all figures in a form, and those of later papers that are recorded in it."""
    for name in (*FIGURES, *LATER):
        path = RESULTS / f"{name}-{form}.json"
        if name in FIGURES or path.is_file():
            yield from json.loads(path.read_text(encoding="utf-8"))["rows"].values()


def shown(value: Any) -> str:
    """A value with three digits."""
    return f"{value:,.3g}" if isinstance(value, float) else str(value)


def percent(value: float | None) -> str:
    """A share with one digit; nothing for None."""
    return (
        ""
        if value is None
        else f"{100 * value:.1f} %"
        if value < 0.0995
        else f"{100 * value:.0f} %"
    )
