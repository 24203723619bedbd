"""Curves of latency over throughput, and the throughput at a latency."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """Requests per second, and the median of the normalised latency in ms per token."""

    throughput: float
    latency: float


Points = Sequence[Point]
NONE = Point(0.0, math.nan)
"""No rate reaches the latency."""


def between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The y of a rising curve at x, by straight lines between logarithms; infinite beyond its ends."""
    if not xs[0] <= x <= xs[-1]:
        return math.inf
    after = max(1, bisect_left(xs, x))
    (x0, x1), (y0, y1) = xs[after - 1 : after + 1], ys[after - 1 : after + 1]
    if y0 == y1 or x0 == x1:
        return y1
    share = math.log(x / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0) ** share


def rising(values: Sequence[float]) -> list[float]:
    """The largest value so far: a saturated system may be a little slower at a higher rate."""
    found: list[float] = []
    for value in values:
        found.append(max(value, found[-1]) if found else value)
    return found


def throughput_at(
    latency: float,
    run: Callable[[float], Point],
    top: float,
    steps: int = 9,
    bottom: float = 0.0,
    best: Point = NONE,
) -> Point:
    """The point of highest throughput with at most this latency, by halving the range of rates.

    Args:
        latency: in ms per token.
        run: returns the point at a rate; the latency must rise with the rate.
        top: a rate at or above the saturation.
        steps: halvings; each costs a run.
        bottom: a rate with at most this latency.
        best: the point at `bottom`.
    """
    low = bottom
    high = top
    for _ in range(steps):
        rate = (low + high) / 2
        point = run(rate)
        if point.latency <= latency:
            low = rate
            best = point
        else:
            high = rate
    return best


def throughput_along(curve: Points, latency: float) -> float | None:
    """The throughput of a curve at a latency, between its points; None below its first latency or above its last."""
    latencies = rising([each.latency for each in curve])
    if not latencies[0] <= latency <= latencies[-1]:
        return None
    return between(latencies, rising([each.throughput for each in curve]), latency)
