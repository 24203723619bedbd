"""Curves of systems in alternation: at each load every system runs once, in changing order."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from lab.paper.curves import NONE, Point, throughput_along, throughput_at
from lab.paper.runs import Lengths, poisson
from lab.paper.systems import parse_system
from lab.real.budget import LEAST_REQUESTS, PlannedRun, seconds_of_a_run
from lab.real.laboratory import Laboratory

LOADS = (0.4, 0.7, 0.85, 1.0, 1.3)
"""Arrival rates of a curve, as multiples of the throughput with all requests at once."""
BATCHES = 6
"""The fewest batches of the largest size in a run of a curve: the rate of a single one is that of its last tokens."""
HALVINGS = 3
"""Of the rates between two points of a curve, to find the throughput at a latency; each costs a run."""
HEADLINE_WEIGHT = 2.0
"""The requests of a run for the headline, as a multiple of those of a curve's."""

Workload = Callable[[int], Sequence[Lengths]]
"""The first requests of a workload, by their number."""


@dataclass
class Sweep:
    """Runs of several systems on one workload.

    Args:
        laboratory: runs them.
        workload: the requests.
        names: of the systems.
        seed: of arrivals and prompts.
        loads: in rising order, as `LOADS`.
        is_normalized: False: the latency of a point is not divided by the generated tokens.
    """

    laboratory: Laboratory
    workload: Workload
    names: Sequence[str]
    seed: int
    loads: Sequence[float] = LOADS
    is_normalized: bool = True
    runs: list[dict[str, Any]] = field(default_factory=list)  # in the order of time
    curves: dict[str, list[Point]] = field(default_factory=dict)
    saturations: dict[str, float] = field(default_factory=dict)  # requests per second

    def saturate(self) -> None:
        """Measure each system with all requests there from the start."""
        for name in self.names:
            count = _planned(name, 1.0).least
            self.saturations[name] = self._run(name, count, None).throughput

    def measure(self, minutes: float, headline: Sequence[str] = ()) -> float:
        """Measure the curves, and return the seconds left for each run of `headline` between their points."""
        plans = [_planned(name, load) for load, name in product(self.loads, self.names)]
        halvings = product(headline, range(HALVINGS))
        later = [_planned(name, 0.9, HEADLINE_WEIGHT) for name, _ in halvings]
        seconds = seconds_of_a_run([*plans, *later], self.saturations, 60 * minutes)
        self.curves = {name: [] for name in self.names}
        order = list(self.names)
        for load in self.loads:
            for name in order:
                top = self.saturations[name]
                count = _planned(name, load).requests(seconds, top)
                self.curves[name].append(self._run(name, count, load * top, load))
            order.reverse()
        return seconds

    def at_latency(self, latency: float, names: Sequence[str], seconds: float) -> dict[str, Point]:
        """The point of highest throughput of each system with at most this latency; NONE if its curve stays below.

        The rates between the last point below the latency and the first above it are halved, in alternation.
        """
        return {name: self._halved(name, latency, seconds) for name in names}

    def _halved(self, name: str, latency: float, seconds: float) -> Point:
        top = self.saturations[name]
        curve = self.curves[name]
        above = next((n for n, point in enumerate(curve) if point.latency > latency), None)
        if above is None:
            return NONE
        count = _planned(name, 0.9, HEADLINE_WEIGHT).requests(seconds, top)
        low, best = (
            (self.loads[above - 1], curve[above - 1]) if above else (0.0, Point(0.0, math.nan))
        )

        def run(rate: float) -> Point:
            return self._run(name, count, rate, rate / top)

        return throughput_at(latency, run, self.loads[above] * top, HALVINGS, low * top, best)

    def _run(self, name: str, count: int, rate: float | None, load: float | None = None) -> Point:
        requests = self.workload(count)
        arrivals = arrivals_at(rate, count, self.seed)
        system = parse_system(name)
        start = time.monotonic()
        result, machine = self.laboratory.quiet.run_quietly(
            lambda: self.laboratory.serve_requests(system, requests, arrivals, seed=self.seed)
        )
        result = replace(result, throughput=steady_throughput(result.ends))
        warm = count - len(result.normalized)
        latency = 1e3 * statistics.median(
            [end - at for end, at in zip(result.ends, arrivals, strict=True)][warm:]
        )
        self.runs.append(
            {
                "system": name,
                "load": load,
                "rate": rate,
                "requests": count,
                "measured_requests": len(result.normalized),
            }
            | {"seconds": time.monotonic() - start, **machine}
            | ({"requests_per_s": result.throughput} if rate is None else result.figures)
            | {"median_latency_ms": latency}
        )
        point = Point(result.throughput, result.point[1] if self.is_normalized else latency)
        shown = f"{point.throughput:.3g} requests/s, {point.latency:.0f} {'ms/token' if self.is_normalized else 'ms'}"
        print(
            f"  {name:<12} {count:>4} requests, {'all at once' if rate is None else f'{rate:.3g}/s'}: {shown}",
            flush=True,
        )
        return point


def _planned(name: str, load: float, weight: float = 1.0) -> PlannedRun:
    return PlannedRun(name, load, weight, max(LEAST_REQUESTS, BATCHES * parse_system(name).max_bs))


def steady_throughput(ends: Sequence[float]) -> float:
    """Requests that end per second between the ends of the first and of the last tenth.

    Short runs need it: no request ends in their first seconds. Requests that end together count as one batch.
    """
    ordered = sorted(ends)
    first = ordered[len(ordered) // 10]
    last = ordered[len(ordered) - 1 - len(ordered) // 10]
    if first == last:
        return len(ordered) / ordered[-1]
    return sum([first < end <= last for end in ordered]) / (last - first)


def arrivals_at(rate: float | None, count: int, seed: int) -> list[float]:
    """Draw `count` Poisson arrival times, scaled so that the next one would come at `count / rate` seconds.

    They are zeros if `rate` is None.
    """
    if rate is None:
        return [0.0] * count
    drawn = poisson(rate, count + 1, seed)
    return [at * count / rate / drawn[-1] for at in drawn[:-1]]


def ratios(
    curves: Mapping[str, Sequence[Point]], ours: str, theirs: str, latencies: Sequence[float]
) -> dict[str, Any]:
    """The throughput of two systems at equal latencies, along their curves; None beyond the end of a curve."""
    found: dict[str, Any] = {}
    for latency in latencies:
        mine = throughput_along(curves[ours], latency)
        other = throughput_along(curves[theirs], latency)
        found[f"{latency:.0f} ms"] = {
            ours: mine,
            theirs: other,
            "ratio": mine / other if mine and other else None,
        }
    return found
