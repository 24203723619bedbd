"""Repeat Figure 10 with other numbers: without each fitted one, and with other seeds."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from lab.paper.effort import Effort, add_processes
from lab.paper.fits import FITTED, UNFITTED, Fit, one_pair
from lab.paper.held_out import held_out
from lab.paper.places import Place
from lab.paper.points import latency_errors, orca_systems, read_figure_10, saturation_error
from lab.paper.sweep import paper_curve
from lab.reproduce import claims
from lab.reproduce.command import RESULTS
from orca_jax.helpers.reporting import print_table, rounded, write_file

WHAT_IF: Mapping[str, Callable[[], Fit]] = {
    "as published": lambda: FITTED,
    "attention batched: no seconds for each request": lambda: replace(FITTED, request=0.0),
    "one iteration in flight on one stage, as Algorithm 1 is written": lambda: replace(
        FITTED, in_flight=1
    ),
    "the pair of 175B for all models": lambda: replace(
        FITTED, efficiencies=one_pair(*FITTED.efficiencies["175B"])
    ),
    "one pair, fitted to 101B and 341B": held_out,
    "not fitted: the pair of BLOOM-176B": lambda: UNFITTED,
}
FACTORS = (1.0, 1.25, 1.3, 1.47)
NUM_SEEDS = 5
EFFORT = Effort(requests=600)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_processes(parser)


def run(args: argparse.Namespace) -> int:
    """Print and record the table and the intervals."""
    effort = replace(EFFORT, processes=args.processes)
    table = {name: orca_errors(make(), effort) for name, make in WHAT_IF.items()}
    print_table(
        "what if: mean |log| of ORCA's latency, and of its saturation",
        {n: _cells(e) for n, e in table.items()},
    )
    ratios = {
        f"{factor:g}": _headline(replace(FITTED, ft_factor=factor), effort) for factor in FACTORS
    }
    print_table("the headline by the factor of FasterTransformer", ratios)
    values = [_headline(FITTED, replace(effort, seed=seed)) for seed in range(NUM_SEEDS)]
    seeds = {"mean": fmean(values), "standard_deviation": stdev(values), "values": values}
    print_table(
        f"the headline over {NUM_SEEDS} seeds", {"mean": seeds["mean"], "deviation": stdev(values)}
    )
    line = rounded({"requests": effort.requests, "table": table, "factors": ratios, "seeds": seeds})
    write_file(RESULTS / "what-if.json", (json.dumps(line, indent=1) + "\n").encode())
    return 0


def _headline(fit: Fit, effort: Effort) -> float:
    ratio: float = claims.headline(effort, fit)[0].ours
    return ratio


def orca_errors(fit: Fit, effort: Effort) -> dict[str, Any]:
    """The errors of ORCA's latency (within the tolerance) and saturation by model."""
    paper = read_figure_10()
    cases = orca_systems(paper, paper)
    places = [Place(model, fit=fit) for model, _ in cases]
    curves = effort.map(paper_curve, [name for _, name in cases], places, [effort] * len(cases))
    errors: dict[str, dict[str, list[float]]] = {}
    for (model, name), curve in zip(cases, curves, strict=True):
        each = errors.setdefault(model, {"latency": [], "saturation": []})
        each["latency"] += latency_errors(curve.points, paper[model][name])
        each["saturation"].append(abs(saturation_error(curve.saturation, paper[model][name])))
    means = {}
    for model, each in errors.items():
        means[model] = {what: fmean(values) for what, values in each.items()}
    return means


def _cells(errors: Mapping[str, Any]) -> str:
    return "  ".join(
        f"{model} {each['latency']:.1%}, {each['saturation']:.1%}" for model, each in errors.items()
    )
