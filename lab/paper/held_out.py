"""Fit one pair of shares to 101B and 341B together, to predict 175B.

The rule, stated before the first run. The pair (m, c) minimises the mean of two numbers: on 101B and on 341B, the mean
|log| of the latency of ORCA's systems at the digitised points up to 90 % of each system's largest throughput, without
a tolerance. Runs have 1,000 requests with seed 0. `request` and two iterations in flight are those of the fitted
numbers; neither saw 175B. The search begins at (0.50, 0.50). It takes the best of the eight neighbours at a distance of
0.04 until none is better, then 0.02, then 0.01. The result is recorded, and the figures read it.
"""

import argparse
import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean

from lab.paper.effort import Effort
from lab.paper.fits import FITTED, Fit, one_pair
from lab.paper.places import Place
from lab.paper.points import latency_errors, orca_systems, read_figure_10
from lab.paper.sweep import paper_curve
from orca_jax.flags import add_number
from orca_jax.helpers.reporting import write_file

RESULT = Path(__file__).parents[1] / "results" / "held-out.json"
TRAINED_ON = ("101B", "341B")
START = (50, 50)  # hundredths
STEPS = (4, 2, 1)
EFFORT = Effort(requests=1000)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_number(parser, "--processes", 1, "processes")


def run(args: argparse.Namespace) -> int:
    """Search for the pair, and record it."""
    effort = replace(EFFORT, processes=args.processes)
    tried: dict[tuple[int, int], float] = {}

    def loss(pair: tuple[int, int]) -> float:
        if pair not in tried:
            tried[pair] = training_error(
                replace(FITTED, efficiencies=one_pair(*[each / 100 for each in pair])), effort
            )
            print(f"m {pair[0] / 100:.2f}, c {pair[1] / 100:.2f}: {tried[pair]:.2%}", flush=True)
        return tried[pair]

    best = START
    for step in STEPS:
        while True:
            moves = product((-step, 0, step), repeat=2)
            around = [(best[0] + x, best[1] + y) for x, y in moves]
            nearest = min([best, *around], key=loss)
            if nearest == best:
                break
            best = nearest
    line = {
        "memory": best[0] / 100,
        "compute": best[1] / 100,
        "training_error": tried[best],
        "tried": len(tried),
    }
    write_file(RESULT, (json.dumps(line, indent=1) + "\n").encode())
    return 0


def training_error(fit: Fit, effort: Effort) -> float:
    """The mean error of both models."""
    paper = read_figure_10()
    cases = orca_systems(paper, TRAINED_ON)
    curves = effort.map(
        paper_curve,
        [name for _, name in cases],
        [Place(model, fit=fit) for model, _ in cases],
        [effort] * len(cases),
    )
    errors: dict[str, list[float]] = {model: [] for model in TRAINED_ON}
    for (model, name), found in zip(cases, curves, strict=True):
        errors[model] += latency_errors(found.points, paper[model][name], tolerance=0.0)
    return fmean([fmean(each) for each in errors.values()])


@cache
def held_out() -> Fit:
    """The fit of the recorded pair."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    return replace(
        FITTED, kind="held out", efficiencies=one_pair(found["memory"], found["compute"])
    )
