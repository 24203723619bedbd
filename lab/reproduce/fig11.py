"""Figure 11: latency over throughput of equal requests on 175B (section 6.2). The paper does not normalise it."""

import statistics
from itertools import product
from typing import Any

from lab.baselines import POLICIES
from lab.paper.effort import Effort
from lab.paper.places import Place, serve_system
from lab.paper.runs import Lengths, homogeneous, poisson
from lab.paper.sweep import LOADS, saturation
from lab.paper.systems import System, parse_system
from lab.reproduce.rows import Row

SYSTEMS = ("ft(1,1)", "ft(8,8)", "ft(16,8)", "orca(1)", "orca(8)", "orca(16)", "orca(32)")
EQUAL = {"(32,32)": (32, 32), "(256,256)": (256, 256)}


def reproduce(effort: Effort) -> tuple[dict[str, Any], list[Row]]:
    """Return the results and their rows."""
    cases = list(product(EQUAL, SYSTEMS))
    found = effort.map(
        curve, [kind for kind, _ in cases], [name for _, name in cases], [effort] * len(cases)
    )
    tops: dict[str, dict[str, float]] = {kind: {} for kind in EQUAL}
    curves: dict[str, dict[str, Any]] = {kind: {} for kind in EQUAL}
    for (kind, name), (top, points) in zip(cases, found, strict=True):
        tops[kind][name] = top
        curves[kind][name] = points
    return {"curves": curves, "saturation": tops}, rows_of(tops)


def rows_of(tops: dict[str, dict[str, float]]) -> list[Row]:
    """The rows of saturations by lengths and system."""
    rows = []
    for kind, rates in tops.items():
        rows.append(_order(kind, rates, "orca(1)", "ft(8,8)", "C7"))
        rows += [_order(kind, rates, f"ft({size},8)", f"orca({size})", "") for size in (8, 16)]
    return rows


def saturations(place: Place, effort: Effort) -> dict[str, dict[str, float]]:
    """The saturations at a place, by lengths and system."""
    found: dict[str, dict[str, float]] = {}
    for kind, name in product(EQUAL, SYSTEMS):
        system = parse_system(name, POLICIES)
        requests = equal_requests(kind, system, effort)
        found.setdefault(kind, {})[name] = saturation(system, place, requests)
    return found


def equal_requests(kind: str, system: System, effort: Effort) -> list[Lengths]:
    """The requests of a run."""
    return homogeneous(*EQUAL[kind], max(60, effort.of(system) // 4))


def _order(kind: str, rates: dict[str, float], lower: str, higher: str, claim: str) -> Row:
    ratio = rates[lower] / rates[higher]
    text = f"{kind}: saturation of {lower} as a share of that of {higher}"
    return Row(f"fig11.{kind}.{lower}", text, ratio, "below 1", claim=claim, holds=ratio < 1)


def curve(kind: str, name: str, effort: Effort) -> tuple[float, list[tuple[float, float]]]:
    """The saturation, and the points of throughput and median latency in seconds."""
    system = parse_system(name, POLICIES)
    place = Place()
    requests = equal_requests(kind, system, effort)
    top = saturation(system, place, requests)
    points = []
    for load in LOADS[::2]:
        run = serve_system(system, place, requests, poisson(load * top, len(requests), effort.seed))
        generated = requests[0].num_generated
        points.append((run.throughput, statistics.median(run.normalized) * generated))
    return top, points
