"""Figure 10: latency over throughput with the paper's workload, on 101B, 175B and 341B (section 6.2)."""

from collections.abc import Generator, Mapping
from dataclasses import asdict
from itertools import chain
from statistics import fmean
from typing import Any

from lab.paper.effort import Effort
from lab.paper.fits import FITTED, UNFITTED, Fit
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
Steps = Generator[list[Row], None, dict[str, Any]]
"""Yields rows as they are known, and returns the results."""


def reproduce(effort: Effort, models: tuple[str, ...] = MODELS) -> Steps:
    """Yield the rows of each model, then those of all; return the results."""
    paper = read_figure_10()
    fitted: dict[str, Curves] = {}
    found: dict[str, dict[str, Curves]] = {FITTED.kind: fitted}
    for model in models:
        fitted[model] = _curves(model, FITTED, paper, effort)
        yield errors(model, fitted[model], paper)
        yield [claims.larger_batches(model, fitted[model])]
        if model == "101B":
            yield [claims.low_load(fitted[model], paper[model])]
        if model == "341B":
            yield claims.order_of_magnitude(model, fitted[model], FITTED, paper[model])
    if len(models) == len(MODELS):
        yield saturations(fitted, paper)
    if HELD_OUT in models:
        for fit in (held_out(), UNFITTED):
            found[fit.kind] = {HELD_OUT: _curves(HELD_OUT, fit, paper, effort)}
            yield predictions(fit.kind, found[fit.kind][HELD_OUT], paper)
        yield claims.headline(effort)
        yield claims.best_sizes(effort)
    shown = {}
    for kind, each in found.items():
        shown[kind] = {model: _as_dicts(curves) for model, curves in each.items()}
    return {"curves": shown}


def _as_dicts(curves: Curves) -> dict[str, dict[str, Any]]:
    return {name: asdict(curve) for name, curve in curves.items()}


def _curves(model: str, fit: Fit, paper: Digitised, effort: Effort) -> Curves:
    """The curve of each system that the paper has for a model."""
    names = list(paper[model])
    place = Place(model, fit=fit)
    curves = effort.map(paper_curve, names, [place] * len(names), [effort] * len(names))
    return dict(zip(names, curves, strict=True))


def errors(model: str, curves: Curves, paper: Digitised, kind: str = "fitted") -> list[Row]:
    """The errors of latency of both engines, with the tolerance of the digitising and without."""
    rows = []
    for engine, title in (("orca", "ORCA"), ("ft", "FasterTransformer")):
        limit = FT_LIMIT if engine == "ft" else ORCA_LIMITS[model]
        points = {name: each for name, each in paper[model].items() if name.startswith(engine)}
        for tolerance, name in ((0.02, "latency"), (0.0, "strict")):
            of_systems = [
                latency_errors(curves[each].points, points[each], tolerance) for each in points
            ]
            error = fmean(chain.from_iterable(of_systems))
            text = f"{model}: mean |log| of latency, {title}" + (
                "" if tolerance else ", without tolerance"
            )
            rows.append(
                Row(
                    f"fig10.{model}.{engine}.{name}",
                    text,
                    error,
                    "points",
                    error,
                    limit if tolerance else None,
                )
            )
    return rows


def saturations(found: Mapping[str, Curves], paper: Digitised) -> list[Row]:
    """The errors of the throughput with all requests at once."""
    values = {}
    for model, curves in found.items():
        for name, points in paper[model].items():
            error = saturation_error(curves[name].saturation, points)
            values[f"{name} on {model}"] = error
    worst = max(values, key=lambda name: abs(values[name]))
    mean = fmean([abs(value) for value in values.values()])
    limit, limit_of_worst = SATURATION_LIMITS
    return [
        Row("fig10.saturation.mean", "saturation of all systems and models: mean |log|", mean, "points", mean, limit),
        Row("fig10.saturation.worst", f"the worst of them, {worst}", values[worst], "points", abs(values[worst]),
            limit_of_worst),
    ]  # fmt: skip


def predictions(kind: str, curves: Curves, paper: Digitised) -> list[Row]:
    """The errors on 175B of a fit that did not see it."""
    rows = []
    for row in errors(HELD_OUT, curves, paper):
        if not row.name.endswith("latency"):
            continue
        _, model, engine, _ = row.name.split(".")
        is_judged = kind == "held out" and engine == "orca"
        limit = HELD_OUT_LIMIT if is_judged else None
        name = f"fig10.{model}.{engine}.{kind.replace(' ', '_')}"
        rows.append(Row(name, f"{row.text}, {kind}", row.ours, row.paper, row.error, limit))
    return rows
