"""Points read off the paper's figures, and the errors of curves against them."""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lab.baselines import POLICIES
from lab.paper.curves import Point, Points, between, rising
from lab.paper.systems import parse_system
from orca_jax.values.errors import ConfigError

FIGURE_10 = Path(__file__).with_name("orca_fig10.csv")
FIGURE_9B = Path(__file__).with_name("orca_fig9b.csv")
KNEE = 0.9
"""The share of the largest digitised throughput up to which latencies are compared."""
DIGITISING = 0.02
"""Requests per second: the error of a digitised point."""
BEYOND = math.log(2)
"""The error of a point whose throughput a curve never reaches."""

Digitised = Mapping[str, Mapping[str, Points]]
"""Points of Figure 10 by model and system."""


def read_figure_10(path: Path = FIGURE_10) -> Digitised:
    """Read the points of Figure 10. Raises ConfigError if the file has another format."""
    points: dict[str, dict[str, list[Point]]] = {}
    for row in _rows(path):
        try:
            model, name, throughput, latency = row.values()
            system = parse_system(name, POLICIES).name
            points.setdefault(model, {}).setdefault(system, []).append(
                Point(float(throughput), float(latency))
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path.name}: wrong line {row}: {error}", param="points") from error
    return points


def orca_systems(paper: Digitised, models: Iterable[str]) -> list[tuple[str, str]]:
    """The models, each with the names of its systems of ORCA."""
    found: list[tuple[str, str]] = []
    for model in models:
        found += [(model, name) for name in paper[model] if name.startswith("orca")]
    return found


def read_figure_9b(path: Path = FIGURE_9B) -> dict[tuple[str, int, int], float]:
    """Read the milliseconds of a batch by engine, prompt tokens and size."""
    return {
        (row["engine"], int(row["num_prompt"]), int(row["batch_size"])): float(row["ms"])
        for row in _rows(path)
    }


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        yield from csv.DictReader(line for line in file if not line.startswith("#"))


def latency_errors(curve: Points, points: Points, tolerance: float = DIGITISING) -> list[float]:
    """The absolute logarithms of our latency over the paper's, at the points up to `KNEE` of the largest throughput.

    The curve has rising rates of arrival, so both axes rise along it. Before its first point it is flat. It is read at
    the best throughput within `tolerance` of a point's.
    """
    throughputs = rising([each.throughput for each in curve])
    latencies = rising([each.latency for each in curve])
    xs = [0.0, *throughputs]
    ys = [latencies[0], *latencies]
    knee = KNEE * max([point.throughput for point in points])

    def error(point: Point) -> float:
        low = max(0.0, point.throughput - tolerance)
        high = point.throughput + tolerance
        if low > xs[-1]:
            return BEYOND
        # infinite beyond the curve
        least = between(xs, ys, low)
        most = between(xs, ys, high)
        return abs(math.log(min(max(point.latency, least), most) / point.latency))

    return [error(point) for point in points if point.throughput <= knee]


def saturation_error(ours: float, points: Points) -> float:
    """The logarithm of our saturation over the paper's largest throughput."""
    return math.log(ours / max([point.throughput for point in points]))


def largest(points: Sequence[Point]) -> float:
    """The paper's largest throughput of a system."""
    return max([point.throughput for point in points])
