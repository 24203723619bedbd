"""The figures of the paper's evaluation: Figure 9 (engines), Figure 10 (the workload), Figure 11 (equal requests)."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lab.paper.effort import Effort
from lab.paper.places import Place, simulate
from lab.paper.points import Digitised, distance
from orca_jax.bench.paper.curves import Point, throughput_at
from orca_jax.bench.paper.runs import Lengths, homogeneous, paper_lengths, poisson
from orca_jax.bench.paper.systems import System, parse_system
from orca_jax.errors import ConfigError

PANELS = ("101B", "175B", "341B")
SYSTEMS = ("ft(1,1)", "ft(8,8)", "orca(1)", "orca(8)", "orca(16)", "orca(32)")
OF_EQUAL_REQUESTS = ("ft(1,1)", "ft(8,8)", "ft(16,8)", "orca(1)", "orca(8)", "orca(16)", "orca(32)")
EQUAL = {"(32,32)": (32, 32), "(256,256)": (256, 256)}
LOADS = (0.02, 0.1, 0.2, 0.35, 0.5, 0.65, 0.75, 0.85, 0.92, 0.97, 1.02, 1.1, 1.3, 1.7)
"""Arrival rates of a curve, as multiples of the throughput with all requests at once."""
QUIET = 0.5
"""Up to this load a third of the requests is enough: latencies hardly vary."""
KNEE = 0.9
"""The share of the largest digitised throughput from which on a curve counts as steep."""
HEADLINE_LATENCY = 190.0
"""ms per token: the paper compares 175B at twice the normalised execution time of a batch of 32 (section 6.2)."""
HEADLINE = ("orca(32)", "ft(1,1)")
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MICRO_GENERATED = 32
FIGURE_9B = {
    ("orca", 32): (1000, 1060, 1150, 1230, 1260, 1420),
    ("orca", 128): (1050, 1130, 1210, 1320, 1500, 1950),
    ("ft", 32): (1000, 1020, 1080, 1130),
    ("ft", 128): (1000, 1050, 1120, 1200),
}
"""Milliseconds of a batch of 1, 2, 4, ... requests, read off the paper's Figure 9b: engine, prompt tokens; +-5 %."""


def curve(system: System, place: Place, requests: Sequence[Lengths], seed: int) -> list[Point]:
    """The points of a system over rising rates."""
    top = saturation(system, place, requests)
    points = []
    for load in LOADS:
        some = requests[: max(10, len(requests) // 3)] if load <= QUIET else requests
        points.append(Point(*simulate(system, place, some, poisson(load * top, len(some), seed)).point))
    return points


def saturation(system: System, place: Place, requests: Sequence[Lengths]) -> float:
    """Requests per second with every request there from the start, without the first and the last tenth."""
    ends = sorted(simulate(system, place, requests, [0.0] * len(requests)).ends)
    first, last = len(ends) // 10, len(ends) - 1 - len(ends) // 10
    if ends[last] == ends[first]:
        return len(ends) / ends[-1]
    return (last - first) / (ends[last] - ends[first])


def figure_9() -> dict[str, Any]:
    """Milliseconds of a batch of equal requests: 13B, 101B and 175B with 32 generated tokens (section 6.1)."""
    found: dict[str, Any] = {}
    for figure, model in (("9a", "13B"), ("9b", "101B"), ("9c", "175B")):
        found[figure] = {
            f"{engine}({num_prompt})": [micro(engine, model, num_prompt, size) for size in MICRO_BATCHES]
            for engine in ("orca", "ft")
            for num_prompt in (32, 128)
        }
    errors = [
        abs(math.log(ours / theirs))
        for (engine, num_prompt), row in FIGURE_9B.items()
        for ours, theirs in zip(found["9b"][f"{engine}({num_prompt})"], row, strict=False)
    ]
    faster = [f / o for f, o in zip(found["9c"]["ft(32)"], found["9c"]["orca(32)"], strict=True) if f is not None]
    return {
        "batch_ms": found,
        "batch_sizes": list(MICRO_BATCHES),
        "9b": {"mean_abs_log_error": statistics.fmean(errors), "max_abs_log_error": max(errors)},
        "9c_orca_faster_by": max(faster) - 1,
    }


def micro(engine: str, model: str, num_prompt: int, size: int) -> float | None:
    """Milliseconds of a batch; None if it is out of memory.

    In a pipeline ORCA has half of the batch in each of two iterations in flight, and FasterTransformer the same halves
    as microbatches.
    """
    place = Place(model)
    parts = min(size, place.num_stages)
    mine = System("orca", -(-size // parts)) if engine == "orca" else System("ft", size, -(-size // parts))
    if not place.fits(mine):
        return None
    requests = homogeneous(num_prompt, MICRO_GENERATED, size)
    return 1e3 * max(simulate(mine, place, requests, [0.0] * size).ends)


def figure_10(
    effort: Effort, digitised: Digitised, panels: Sequence[str], systems: Sequence[str], device: str
) -> dict[str, Any]:
    """The curves of the paper's workload by panel, and their errors."""
    places = {panel: Place(panel, device) for panel in panels}
    names = [(panel, name) for panel in panels for name in systems if places[panel].fits(parse_system(name))]
    curves = effort.map(
        _curve_10, [places[panel] for panel, _ in names], [name for _, name in names], [effort] * len(names)
    )
    found: dict[str, dict[str, list[Point]]] = {panel: {} for panel in panels}
    for (panel, name), points in zip(names, curves, strict=True):
        found[panel][name] = points
    missing = {panel: [name for name in systems if name not in found[panel]] for panel in panels}
    result: dict[str, Any] = {"curves": found, "out_of_memory": missing}
    if digitised:
        result |= errors_of(found, digitised)
    return result


def _curve_10(place: Place, name: str, effort: Effort) -> list[Point]:
    system = parse_system(name)
    return curve(system, place, paper_lengths(effort.of(system), effort.seed), effort.seed)


def errors_of(curves: Mapping[str, Mapping[str, Sequence[Point]]], digitised: Digitised) -> dict[str, Any]:
    """The mean errors of each panel against the digitised points, along the nearer axis and along a given one."""
    means: dict[str, float] = {}
    given: dict[str, float] = {}
    systems: dict[str, dict[str, float]] = {}
    for panel, ours in curves.items():
        shared = {name: points for name, points in digitised.get(panel, {}).items() if name in ours}
        errors = {name: [distance(ours[name], point).nearest for point in points] for name, points in shared.items()}
        if not errors:
            raise ConfigError(f"the digitised file has no points of {panel} and these systems", param="digitised")
        means[panel] = statistics.fmean([error for each in errors.values() for error in each])
        systems[panel] = {name: statistics.fmean(each) for name, each in errors.items()}
        given[panel] = statistics.fmean([e for name in shared for e in _along_given_axis(ours[name], shared[name])])
    return {
        "mean_abs_log_error": means,
        "mean_abs_log_error_along_given_axis": given,
        "mean_abs_log_error_of_systems": systems,
    }


def _along_given_axis(curve: Sequence[Point], points: Sequence[Point]) -> list[float]:
    """The errors in latency of points below `KNEE` of the largest digitised throughput, in throughput of the others."""
    knee = KNEE * max([point.throughput for point in points])
    errors = [(distance(curve, point), point.throughput <= knee) for point in points]
    return [error.latency if is_below and error.latency < math.inf else error.throughput for error, is_below in errors]


def headline(effort: Effort) -> dict[str, Any]:
    """The ratio of throughputs at 190 ms per token, with three times the requests of a curve's run."""
    points = effort.map(_headline_point, HEADLINE, [effort] * 2)
    ours, theirs = points
    return {
        "headline_ratio": ours.throughput / theirs.throughput,
        "headline_points": dict(zip(HEADLINE, points, strict=True)),
        "headline_requests": 3 * effort.requests,
    }


def _headline_point(name: str, effort: Effort) -> Point:
    system, place, count = parse_system(name), Place(), 3 * effort.requests
    requests = paper_lengths(count, effort.seed)

    def run(rate: float) -> Point:
        return Point(*simulate(system, place, requests, poisson(rate, count, effort.seed)).point)

    return throughput_at(HEADLINE_LATENCY, run, 1.1 * saturation(system, place, requests[: effort.requests]))


def figure_11(effort: Effort, systems: Sequence[str] = OF_EQUAL_REQUESTS) -> dict[str, Any]:
    """The curves of equal requests on 175B."""
    names = [(kind, name) for kind in EQUAL for name in systems if Place().fits(parse_system(name))]
    curves = effort.map(_curve_11, [kind for kind, _ in names], [name for _, name in names], [effort] * len(names))
    found: dict[str, dict[str, list[Point]]] = {kind: {} for kind in EQUAL}
    for (kind, name), points in zip(names, curves, strict=True):
        found[kind][name] = points
    return {"curves": found}


def _curve_11(kind: str, name: str, effort: Effort) -> list[Point]:
    system = parse_system(name)
    return curve(system, Place(), homogeneous(*EQUAL[kind], max(20, effort.of(system) // 2)), effort.seed)
