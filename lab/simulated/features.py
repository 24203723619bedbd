"""Fits a cost of many features to a timeline, and measures it on iterations that the fit has not seen."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from lab.simulated.cost import FeatureCost, features
from orca_jax.sim.cost import IterationCost, WindowShares, windows_of
from orca_jax.timeline.measure import Timeline, members
from orca_jax.timeline.writer import IterationRecord
from orca_jax.tools.timeline.fit import host_seconds, non_negative, work_in
from orca_jax.values.errors import ConfigError

HELD_OUT = 5
"""Every fifth iteration is left out of the fit that is measured."""
PROPORTIONAL = 0.9995
"""The cosine of two features above which the later one is left out."""
MOST_GAP = 10.0
"""A gap of the host above this multiple of the median counts as this multiple."""
ROUNDS = 8
USUAL = 2.0
"""An error above this multiple of the median error counts less, in inverse proportion."""


@dataclass(frozen=True)
class FeatureFit:
    """A cost fitted to all iterations, and the errors of one fitted to four fifths of them on the others."""

    cost: FeatureCost
    held_out: Mapping[str, float]


def fit_features(timeline: Timeline, *others: Timeline) -> FeatureFit:
    """Fit a cost to the device times of all timelines, without negative weights.

    Raises:
        ConfigError: the timelines have too few iterations.
    """
    timelines = (timeline, *others)
    iterations = list(chain.from_iterable(one.iterations for one in timelines))
    if len(iterations) < 2 * HELD_OUT:
        message = f"the timeline has {len(iterations)} iterations, and a fit needs at least {2 * HELD_OUT}"
        raise ConfigError(message, param="timeline")
    most = [each for number, each in enumerate(iterations) if (number + 1) % HELD_OUT]
    left_out = iterations[HELD_OUT - 1 :: HELD_OUT]
    gaps = list(chain.from_iterable(map(host_gaps, timelines)))
    host = (
        float(np.mean(np.minimum(gaps, MOST_GAP * np.median(gaps))))
        if gaps
        else host_seconds(timeline)
    )
    buckets = timeline.head.buckets
    windows = windows_of(timeline.head.cache.groups)
    measured = FeatureCost(_weights(most, windows), host, buckets)
    errors = iteration_errors(measured, left_out, windows)
    return FeatureFit(FeatureCost(_weights(iterations, windows), host, buckets), errors)


def host_gaps(timeline: Timeline) -> list[float]:
    """Seconds from each result to the next plan: recording, delivery, new requests, selection.

    Gaps in which the engine may have waited for arrivals are left out: the plan must share a request with the result.
    """
    gaps = []
    planned = [each.planned for each in timeline.iterations]
    for place, iteration in enumerate(timeline.iterations, 1):
        number = bisect_left(planned, iteration.collected, place)
        if number < len(planned):
            following = timeline.iterations[number]
            if not {n for n, *_ in members(iteration)}.isdisjoint(
                [n for n, *_ in members(following)]
            ):
                gaps.append(following.planned - iteration.collected)
    return gaps


def iteration_errors(
    cost: IterationCost, iterations: Sequence[IterationRecord], windows: WindowShares
) -> Mapping[str, float]:
    """The errors of a cost for the device times of single iterations, and for their sum, as shares of the measured.

    `windows` are those of the model.
    """
    taken = np.array([each.device for each in iterations])
    found = np.array([sum(cost.stages(work_in(each, windows), 1)) for each in iterations])
    variance = float(np.sum((taken - taken.mean()) ** 2))
    return {
        "iterations": len(iterations),
        "median_abs_error": float(np.median(np.abs(found - taken) / np.maximum(taken, 1e-9))),
        "mean_abs_error": float(np.mean(np.abs(found - taken)) / np.mean(taken)),
        "error_of_sum": float(found.sum() / taken.sum() - 1),
        "r_squared": 1 - float(np.sum((taken - found) ** 2)) / variance if variance else 1.0,
    }


def distinct(matrix: np.ndarray) -> list[int]:
    """The columns that are not proportional to an earlier one.

    Of two proportional features, such as steps and the rows of a sampler that has always the same size, the sum of the
    weights is known and each of them is not. A prediction for other sizes must not depend on one.
    """
    lengths = np.maximum(np.linalg.norm(matrix, axis=0), 1e-12)
    likeness = (matrix / lengths).T @ (matrix / lengths)
    return [
        each for each in range(len(likeness)) if not (likeness[each, :each] > PROPORTIONAL).any()
    ]


def _weights(iterations: Sequence[IterationRecord], windows: WindowShares) -> dict[str, float]:
    """Weights for the smallest relative errors, where outliers count little, then scaled to the measured sum.

    A device time is long now and then, for reasons outside of the engine. These times must not bend the weights. Their
    sum counts, since throughput follows from it.
    """
    rows = [features(work_in(each, windows)) for each in iterations]
    names = list(rows[0])
    matrix = np.array([list(row.values()) for row in rows], np.float64)
    kept = distinct(matrix)
    names = [names[column] for column in kept]
    matrix = matrix[:, kept]
    taken = np.array([each.device for each in iterations])
    found = non_negative(matrix, taken)
    least = max(1e-9, 1e-3 * float(taken.mean()))
    for _ in range(ROUNDS):
        predicted = np.maximum(matrix @ found, least)
        errors = np.maximum(np.abs(taken / predicted - 1), 1e-12)
        trust = np.sqrt(np.minimum(1, USUAL * np.median(errors) / errors)) / predicted
        found = non_negative(matrix * trust[:, None], taken * trust)
    total = (matrix @ found).sum()
    found *= taken.sum() / total if total > 0 else 1.0
    return {name: float(weight) for name, weight in zip(names, found, strict=True) if weight > 0}
