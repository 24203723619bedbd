"""Curves of latency over throughput, their distance to digitised points, and the throughput at a latency."""

import csv
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from orca_jax.bench.paper.systems import parse_system
from orca_jax.errors import ConfigError, reason_of

COLUMNS = ("model", "system", "throughput_req_s", "median_norm_latency_ms_per_token")


class Point(NamedTuple):
    """Requests per second, and the median of the normalised latency in ms per token."""

    throughput: float
    latency: float


Points = Sequence[Point]
Digitised = dict[str, dict[str, list[Point]]]
"""Points of Figure 10 by model and system."""


NONE = Point(0.0, math.nan)
"""No rate reaches the latency."""


class Distance(NamedTuple):
    """The errors of a curve at one digitised point, as absolute logarithms of ratios; infinite beyond the curve."""

    latency: float  # at the point's throughput
    throughput: float  # at the point's latency

    @property
    def nearest(self) -> float:
        """The error along the nearer axis: latency on a flat part of the curve, throughput on a steep part."""
        return min(self)


def read_digitised(path: str) -> Digitised:
    """Read points of Figure 10 from a CSV file with the columns `COLUMNS`; lines that begin with # are comments.

    Raises:
        ConfigError: the file cannot be read, or has another format.
    """
    points: Digitised = defaultdict(lambda: defaultdict(list))
    try:
        with open(path, encoding="utf-8", newline="") as file:
            for row in csv.DictReader(line for line in file if not line.startswith("#")):
                model, system, throughput, latency = [row[name] for name in COLUMNS]
                points[model][parse_system(system).name].append(Point(float(throughput), float(latency)))
    except OSError as error:
        raise ConfigError(f"digitised {path!r} cannot be read: {reason_of(error)}", param="digitised") from error
    except (KeyError, TypeError, ValueError, UnicodeDecodeError, csv.Error) as error:
        message = f"digitised {path!r} is not a CSV file with the columns {', '.join(COLUMNS)}: {error}"
        raise ConfigError(message, param="digitised") from error
    return points


def distance(curve: Points, point: Point) -> Distance:
    """The errors of a curve at a point.

    The curve has rising rates of arrival, so both axes rise along it. Beyond its last point it is vertical: the latency
    of a saturated system grows with the length of the run. Before its first point it is flat.
    """
    throughputs, latencies = _rising([each.throughput for each in curve]), _rising([each.latency for each in curve])
    latency = _between([0.0, *throughputs], [latencies[0], *latencies], point.throughput)
    throughput = _between([*latencies, math.inf], [*throughputs, throughputs[-1]], point.latency)
    return Distance(abs(math.log(latency / point.latency)), abs(math.log(throughput / point.throughput)))


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The y of a rising curve at x, by straight lines between logarithms; infinite beyond its ends."""
    if not xs[0] <= x <= xs[-1]:
        return math.inf
    after = max(1, bisect_left(xs, x))
    (x0, x1), (y0, y1) = xs[after - 1 : after + 1], ys[after - 1 : after + 1]
    if y0 == y1 or x0 == x1:
        return y1
    share = math.log(x / x0) / math.log(x1 / x0)
    return y0 * (y1 / y0) ** share


def _rising(values: Sequence[float]) -> list[float]:
    """The largest value so far: a saturated system may be a little slower at a higher rate."""
    found: list[float] = []
    for value in values:
        found.append(max(value, found[-1]) if found else value)
    return found


def throughput_at(
    latency: float, run: Callable[[float], Point], top: float, steps: int = 9, bottom: float = 0.0, best: Point = NONE
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
    low, high = bottom, top
    for _ in range(steps):
        rate = (low + high) / 2
        point = run(rate)
        if point.latency <= latency:
            low, best = rate, point
        else:
            high = rate
    return best


def throughput_along(curve: Points, latency: float) -> float | None:
    """The throughput of a curve at a latency, between its points; None below its first latency or above its last."""
    latencies = _rising([each.latency for each in curve])
    if not latencies[0] <= latency <= latencies[-1]:
        return None
    return _between(latencies, _rising([each.throughput for each in curve]), latency)
