"""Curves of latency over throughput, their distance to digitised points, and the throughput at a latency."""

import csv
import math
from collections import defaultdict
from typing import NamedTuple

from orca_jax.bench.paper.curves import Point, Points, between, rising
from orca_jax.bench.paper.systems import parse_system
from orca_jax.errors import ConfigError, reason_of

COLUMNS = ("model", "system", "throughput_req_s", "median_norm_latency_ms_per_token")


Digitised = dict[str, dict[str, list[Point]]]
"""Points of Figure 10 by model and system."""


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
    throughputs, latencies = rising([each.throughput for each in curve]), rising([each.latency for each in curve])
    latency = between([0.0, *throughputs], [latencies[0], *latencies], point.throughput)
    throughput = between([*latencies, math.inf], [*throughputs, throughputs[-1]], point.latency)
    return Distance(abs(math.log(latency / point.latency)), abs(math.log(throughput / point.throughput)))
