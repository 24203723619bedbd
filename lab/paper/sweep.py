"""Curves of a system over rising rates of arrival, and its saturation."""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.baselines import POLICIES
from lab.paper.curves import Point, throughput_at
from lab.paper.effort import Effort
from lab.paper.places import Place, serve_system
from lab.paper.runs import Lengths, paper_lengths, poisson
from lab.paper.systems import System, parse_system

LOADS = (
    0.02,
    0.035,
    0.055,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.86,
    0.92,
    0.97,
    1.02,
    1.1,
    1.3,
    1.7,
)
"""Arrival rates of a curve, as multiples of the throughput with all requests at once."""
QUIET = 0.5
"""Up to this load a third of the requests is enough, and at least `FEWEST`: latencies hardly vary."""
FEWEST = 200


@dataclass(frozen=True)
class Curve:
    """A system at a place.

    Attributes:
        saturation: requests per second with all requests at once.
        points: throughput and median normalised latency at each load.
    """

    saturation: float
    points: tuple[Point, ...]


def curve(system: System, place: Place, requests: Sequence[Lengths], seed: int) -> Curve:
    """The points of a system over rising rates."""
    top = saturation(system, place, requests)
    points = []
    for load in LOADS:
        some = requests[: max(FEWEST, len(requests) // 3)] if load <= QUIET else requests
        points.append(
            Point(*serve_system(system, place, some, poisson(load * top, len(some), seed)).point)
        )
    return Curve(top, tuple(points))


def saturation(system: System, place: Place, requests: Sequence[Lengths]) -> float:
    """Requests per second with every request there from the start, without the first and the last tenth."""
    return middle_rate(serve_system(system, place, requests, [0.0] * len(requests)).ends)


def middle_rate(times: Sequence[float]) -> float:
    """Ends per second without the first and the last tenth; of all, if these end together."""
    ends = sorted(times)
    first = len(ends) // 10
    last = len(ends) - 1 - len(ends) // 10
    if ends[last] == ends[first]:
        return len(ends) / ends[-1]
    return (last - first) / (ends[last] - ends[first])


def paper_curve(name: str, place: Place, effort: Effort) -> Curve:
    """The curve of the paper's workload."""
    system = parse_system(name, POLICIES)
    return curve(system, place, paper_lengths(effort.of(system), effort.seed), effort.seed)


def point_at(name: str, place: Place, effort: Effort, latency: float) -> Point:
    """The point of highest throughput with at most this median latency in ms per token, for the paper's workload.

    Its runs have three times the requests of a curve's.
    """
    system = parse_system(name, POLICIES)
    count = 3 * effort.of(system)
    requests = paper_lengths(count, effort.seed)

    def run(rate: float) -> Point:
        return Point(
            *serve_system(system, place, requests, poisson(rate, count, effort.seed)).point
        )

    return throughput_at(latency, run, 1.1 * saturation(system, place, requests[: count // 3]))
