"""The paper's figures from measured kernels of A100s, with nothing fitted: `reproduce NAME --cost tables --data DIR`.

Each variant is an assumption about the paper's engine. All have Figure 9b and the saturations of Figure 10; the first
one also has the errors of ORCA's curves without a tolerance, and all rows of the fitted form. A limit that it misses is
an exit status of 1.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean

from lab.baselines import POLICIES
from lab.pages.markdown import write_between
from lab.paper.effort import Effort
from lab.paper.fits import FITTED
from lab.paper.kernels import KernelSource
from lab.paper.places import Place
from lab.paper.points import (
    latency_errors,
    orca_systems,
    read_figure_9b,
    read_figure_10,
    saturation_error,
)
from lab.paper.runs import paper_lengths
from lab.paper.sweep import Curve, paper_curve, point_at, saturation
from lab.paper.systems import parse_system
from lab.reproduce import beside
from lab.reproduce.claims import HEADLINE, LATENCY
from lab.reproduce.fig9 import GENERATED, batch_ms
from lab.reproduce.predicted_page import BASE, BEGIN, END, LIMITS, PAGE, RESULT, block
from lab.reproduce.rows import print_rows
from orca_jax.helpers.reporting import print_table, rounded, write_file

MODELS = ("101B", "175B", "341B")
EFFORT = Effort(requests=2000, single=600)
"""The requests of the fitted form; fewer of systems with one at a time. The paper does not say its own."""
FEW = 600
"""Requests of a saturation alone."""
UNFITTED = replace(FITTED, kind="unfitted", request=0.0, ft_factor=1.0)
VARIANTS: Mapping[str, Callable[[KernelSource], KernelSource]] = {
    BASE: lambda base: base,
    "attention of prompts in another launch": lambda base: base._replace(attention="fused"),
    "that, and products linear between points": lambda base: base._replace(
        attention="fused", tile=1
    ),
    "attention by request": lambda base: base._replace(attention="request", writes=0),
    "attention writes keys and values": lambda base: base._replace(writes=0),
    "host constant from one point of Figure 9b: orca(32) with one request": lambda base: (
        base._replace(host=host_constant(base))
    ),
    "the card of 80 GB, as measured": lambda base: base._replace(bandwidth=0.0),
    "sums of vLLM in a graph": lambda base: base._replace(sums="own"),
    "kernels of TensorRT-LLM": lambda base: base._replace(source="trtllm"),
    "kernels of SGLang": lambda base: base._replace(source="sglang"),
}
type Errors = dict[str, float]


def host_constant(source: KernelSource) -> float:
    """Seconds of an iteration that one request of Figure 9b takes longer than its kernels."""
    ours = batch_ms("orca", "101B", 32, 1, UNFITTED, source)
    assert ours is not None, "one request does not fit"
    paper = read_figure_9b()["orca", 32, 1]
    return max(0.0, (paper - ours) / 1e3 / GENERATED)


def run(folder: Path, processes: int, *, is_recorded: bool) -> int:
    """Print the errors of all variants. Return 1 if one of the first variant is above its limit.

    Raises:
        ConfigError: a table is missing or wrong; `param` is "cost".
    """
    base = KernelSource(folder)
    effort = replace(EFFORT, processes=processes)
    found: dict[str, Errors] = {}
    for name, changed in VARIANTS.items():
        source = changed(base)
        found[name] = batch_errors(source) | saturation_errors(source)
        print_table(name, {key: f"{value:.3f}" for key, value in found[name].items()})
    curves = orca_curves(base, effort)
    found[BASE] |= curve_errors(curves) | {"headline": headline(base, effort)}
    print_table(BASE, {key: f"{value:.3f}" for key, value in found[BASE].items()})
    rows = beside.all_rows(base, UNFITTED, curves, effort)
    print_rows(rows)
    if is_recorded:
        line = {
            "requests": EFFORT.requests,
            "single": EFFORT.single,
            "variants": found,
            "rows": [row.as_json() for row in rows],
        }
        write_file(RESULT, (json.dumps(rounded(line), indent=1) + "\n").encode())
        write_between(PAGE, BEGIN, END, block())
    failed = [key for key, limit in LIMITS.items() if found[BASE][key] > limit]
    for key in failed:
        print(f"FAIL: {key} is {found[BASE][key]:.1%}, at most {LIMITS[key]:.0%}")
    return int(bool(failed))


def batch_errors(source: KernelSource) -> Errors:
    """The mean |log| of the time of a batch in Figure 9b, by engine."""
    off: dict[str, list[float]] = {"9b orca": [], "9b ft": []}
    for (engine, num_prompt, size), paper in read_figure_9b().items():
        ours = batch_ms(engine, "101B", num_prompt, size, UNFITTED, source)
        if ours is not None:
            off[f"9b {engine}"].append(abs(math.log(ours / paper)))
    return {name: fmean(each) for name, each in off.items()}


def orca_curves(source: KernelSource, effort: Effort) -> beside.CurvesByModel:
    """The curves of ORCA in Figure 10, by model and system."""
    cases = orca_systems(read_figure_10(), MODELS)
    places = [Place(model, fit=UNFITTED, kernels=source) for model, _ in cases]
    curves = effort.map(paper_curve, [name for _, name in cases], places, [effort] * len(cases))
    found: dict[str, dict[str, Curve]] = {}
    for (model, name), curve in zip(cases, curves, strict=True):
        found.setdefault(model, {})[name] = curve
    return found


def curve_errors(curves: beside.CurvesByModel) -> Errors:
    """The errors of latency without a tolerance, and of saturations, by model."""
    paper = read_figure_10()
    found = {}
    for model, each in curves.items():
        points = paper[model]
        strict = [latency_errors(curve.points, points[name], 0.0) for name, curve in each.items()]
        found[model] = fmean(chain.from_iterable(strict))
        tops = {name: curve.saturation for name, curve in each.items()}
        found[f"{model} saturations"] = _saturation_error(model, tops)
    return found


def saturation_errors(source: KernelSource) -> Errors:
    """The errors of ORCA's saturations in Figure 10, by model."""
    found = {}
    requests = paper_lengths(FEW, EFFORT.seed)
    for model in MODELS:
        place = Place(model, fit=UNFITTED, kernels=source)
        tops = {}
        for _, name in orca_systems(read_figure_10(), [model]):
            tops[name] = saturation(parse_system(name, POLICIES), place, requests)
        found[f"{model} saturations"] = _saturation_error(model, tops)
    return found


def _saturation_error(model: str, tops: Mapping[str, float]) -> float:
    points = read_figure_10()[model]
    return fmean([abs(saturation_error(top, points[name])) for name, top in tops.items()])


def headline(source: KernelSource, effort: Effort) -> float:
    """Requests per second of ORCA over those of FasterTransformer on 175B at the paper's latency."""
    place = Place("175B", fit=UNFITTED, kernels=source)
    points = effort.map(point_at, HEADLINE, [place] * 2, [effort] * 2, [LATENCY] * 2)
    ratio: float = points[0].throughput / points[1].throughput
    return ratio
