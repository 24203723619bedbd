"""Figure 10: latency over throughput with the paper's workload, on 101B, 175B and 341B (section 6.2)."""

from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

from lab.paper.effort import Effort
from lab.paper.fits import FITTED, UNFITTED
from lab.paper.held_out import held_out
from lab.paper.places import Place
from lab.paper.points import Digitised, latency_errors, read_figure_10, saturation_error
from lab.paper.sweep import Curve, paper_curve
from lab.reproduce import claims
from lab.reproduce.rows import Row

MODELS = ("101B", "175B", "341B")
ORCA_LIMITS = {"101B": 0.07, "175B": 0.02, "341B": 0.03}
FT_LIMIT = 0.10
SATURATION_LIMITS = 0.10, 0.20  # on average, worst
HELD_OUT, HELD_OUT_LIMIT = "175B", 0.06

Curves = Mapping[str, Curve]
"""Curves of a model by system."""


def reproduce(effort: Effort, models: tuple[str, ...] = MODELS) -> tuple[dict[str, Any], list[Row]]:
    """Return the results and their rows."""
    paper = read_figure_10()
    cases = [(FITTED, model, name) for model in models for name in paper[model]]
    if HELD_OUT in models:
        cases += [(fit, HELD_OUT, name) for fit in (held_out(), UNFITTED) for name in paper[HELD_OUT]]
    columns = list(zip(*cases, strict=True))
    places = [Place(model, fit=fit) for fit, model in zip(columns[0], columns[1], strict=True)]
    found: dict[str, dict[str, dict[str, Curve]]] = {}
    for (fit, model, name), curve in zip(
        cases, effort.map(paper_curve, columns[2], places, [effort] * len(cases)), strict=True
    ):
        found.setdefault(fit.kind, {}).setdefault(model, {})[name] = curve
    fitted = found["fitted"]
    rows = [row for model in models for row in errors(model, fitted[model], paper)]
    if len(models) == len(MODELS):
        rows += saturations(fitted, paper)
    if HELD_OUT in models:
        rows += predictions(found, paper)
        rows += claims.headline(effort) + claims.best_sizes(effort)
    if "101B" in models:
        rows.append(claims.low_load(fitted["101B"], paper["101B"]))
    rows += [claims.larger_batches(model, fitted[model]) for model in models]
    if "341B" in models:
        rows.append(claims.order_of_magnitude("341B", fitted["341B"], FITTED))
    shown = {
        kind: {model: {name: asdict(curve) for name, curve in curves.items()} for model, curves in each.items()}
        for kind, each in found.items()
    }
    return {"curves": shown}, rows


def errors(model: str, curves: Curves, paper: Digitised, kind: str = "fitted") -> list[Row]:
    """The errors of latency of both engines, with the tolerance of the digitising and without."""
    rows = []
    for engine, title in (("orca", "ORCA"), ("ft", "FasterTransformer")):
        limit = FT_LIMIT if engine == "ft" else ORCA_LIMITS[model]
        points = {name: each for name, each in paper[model].items() if name.startswith(engine)}
        for tolerance, name in ((0.02, "latency"), (0.0, "strict")):
            error = fmean([e for each in points for e in latency_errors(curves[each].points, points[each], tolerance)])
            text = f"{model}: mean |log| of latency, {title}" + ("" if tolerance else ", without tolerance")
            rows.append(
                Row(f"fig10.{model}.{engine}.{name}", text, error, "points", error, limit if tolerance else None)
            )
    return rows


def saturations(found: Mapping[str, Curves], paper: Digitised) -> list[Row]:
    """The errors of the throughput with all requests at once."""
    values = {
        f"{name} on {model}": saturation_error(curves[name].saturation, points)
        for model, curves in found.items()
        for name, points in paper[model].items()
    }
    worst = max(values, key=lambda name: abs(values[name]))
    mean = fmean([abs(value) for value in values.values()])
    limit, limit_of_worst = SATURATION_LIMITS
    return [
        Row("fig10.saturation.mean", "saturation of all systems and models: mean |log|", mean, "points", mean, limit),
        Row("fig10.saturation.worst", f"the worst of them, {worst}", values[worst], "points", abs(values[worst]),
            limit_of_worst),
    ]  # fmt: skip


def predictions(found: Mapping[str, Mapping[str, Curves]], paper: Digitised) -> list[Row]:
    """The errors on 175B of fits that did not see it."""
    rows = []
    for kind in ("held out", "unfitted"):
        for row in errors(HELD_OUT, found[kind][HELD_OUT], paper):
            if not row.name.endswith("latency"):
                continue
            _, model, engine, _ = row.name.split(".")
            is_judged = kind == "held out" and engine == "orca"
            limit = HELD_OUT_LIMIT if is_judged else None
            name = f"fig10.{model}.{engine}.{kind.replace(' ', '_')}"
            rows.append(Row(name, f"{row.text}, {kind}", row.ours, row.paper, row.error, limit))
    return rows
