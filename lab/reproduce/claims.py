"""Claims of section 6.2 about Figure 10, each as rows; `ARTIFACT.md` lists them."""

import math
from collections.abc import Mapping
from typing import Any

from lab.baselines import POLICIES
from lab.paper.curves import between, rising, throughput_along
from lab.paper.effort import Effort
from lab.paper.fits import Fit
from lab.paper.places import Place
from lab.paper.points import largest
from lab.paper.runs import paper_lengths
from lab.paper.sweep import Curve, point_at, saturation
from lab.paper.systems import parse_system
from lab.reproduce.fig9 import normalised_ms
from lab.reproduce.rows import Row

HEADLINE = ("orca(32)", "ft(1,1)")
PAPER_HEADLINE = {"orca(32)": 6.81, "ft(1,1)": 0.185}
LATENCY = 190.0
"""ms per token: the paper compares at twice the normalised execution time of a batch of 32 (section 6.2)."""
GRID = ("ft(1,1)", "ft(4,4)", "ft(8,8)", "ft(8,4)", "ft(16,16)", "ft(16,8)")
BEST = ("ft(1,1)", "ft(8,8)")
LARGER = ("orca(8)", "orca(16)", "orca(32)")
SAME = 0.05


def headline(effort: Effort, fit: Fit | None = None) -> list[Row]:
    """C1: the ratio of throughputs at 190 ms per token on 175B, with three times the requests of a curve's run."""
    place = Place() if fit is None else Place(fit=fit)
    points = effort.map(point_at, HEADLINE, [place] * 2, [effort] * 2, [LATENCY] * 2)
    ours = dict(zip(HEADLINE, points, strict=True))
    twice = 2 * normalised_ms("175B", place.fit)
    ratio = ours["orca(32)"].throughput / ours["ft(1,1)"].throughput
    paper = 36.9
    rows = [
        Row("fig10.headline", f"175B at {LATENCY:.0f} ms per token: requests/s of orca(32) over those of ft(1,1)",
            ratio, paper, abs(math.log(ratio / paper)), claim="C1", is_input=True)
    ]  # fmt: skip
    for name, value in PAPER_HEADLINE.items():
        mine = ours[name].throughput
        rows.append(
            Row(f"fig10.headline.{name}", f"requests/s of {name} there", mine, value, abs(math.log(mine / value)), 0.10,
                is_input=name.startswith("ft"))
        )  # fmt: skip
    text = "ms per token: twice the normalised time of orca(128) with 32 requests on 175B"
    rows.append(
        Row("fig10.headline.latency", text, twice, LATENCY, abs(math.log(twice / LATENCY)), 0.15)
    )
    return rows


def best_sizes(effort: Effort) -> list[Row]:
    """C3: (1,1) and (8,8) are the best of all (max_bs, mbs) of FasterTransformer."""
    place = Place()
    requests = paper_lengths(max(200, effort.requests // 2), effort.seed)
    found = effort.map(_saturation, GRID, [place] * len(GRID), [requests] * len(GRID))
    rates = dict(zip(GRID, found, strict=True))
    best = max(rates, key=lambda name: rates[name])
    shown = ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
    return [
        Row("fig10.best_sizes", f"175B: the best (max_bs, mbs); saturation {shown}", best, " or ".join(BEST),
            claim="C3", holds=best in BEST)
    ]  # fmt: skip


def _saturation(name: str, place: Place, requests: Any) -> float:
    return saturation(parse_system(name, POLICIES), place, requests)


def low_load(ours: Mapping[str, Curve], paper: Mapping[str, Any]) -> Row:
    """C5: on 101B FasterTransformer is as good as ORCA only at low load: up to the throughput where curves cross."""
    mine = crossing({name: ours[name].points for name in HEADLINE})
    theirs = crossing({name: paper[name] for name in HEADLINE})
    share = mine / largest(paper["orca(32)"])
    text = f"101B: up to this throughput ft(1,1) is as fast as orca(32): {share:.0%} of the saturation of orca(32)"
    return Row("fig10.low_load", text, mine, theirs, abs(math.log(mine / theirs)), 0.20, claim="C5")


def crossing(curves: Mapping[str, Any]) -> float:
    """The first throughput at which ft(1,1) has a higher latency than orca(32); infinite without one."""

    def latency(name: str, at: float) -> float:
        points = curves[name]
        return between(
            rising([p.throughput for p in points]), rising([p.latency for p in points]), at
        )

    start = max([curves[name][0].throughput for name in HEADLINE])
    for step in range(2000):
        at = start + step * 1e-3
        if latency("ft(1,1)", at) > latency("orca(32)", at):
            return at
    return math.inf


def larger_batches(model: str, curves: Mapping[str, Curve]) -> Row:
    """C6: larger batches raise the throughput, and not the latency."""
    tops = [curves[name].saturation for name in LARGER]
    at = 0.8 * tops[0]
    latencies = [_latency_at(curves[name], at) for name in LARGER]
    rise = max(latencies) / latencies[0] - 1
    text = f"{model}: rise of latency from orca(8) to larger batches at {at:.2f} requests/s; saturations rise"
    holds = sorted(tops) == tops and rise <= SAME
    return Row(f"fig10.larger_batches.{model}", text, rise, "none", claim="C6", holds=holds)


def _latency_at(curve: Curve, at: float) -> float:
    return between(
        rising([p.throughput for p in curve.points]), rising([p.latency for p in curve.points]), at
    )


def order_of_magnitude(
    model: str, curves: Mapping[str, Curve], fit: Fit, paper: Mapping[str, Any]
) -> list[Row]:
    """C8: on 341B ORCA serves an order of magnitude more, also if FasterTransformer's stages are as fast as ORCA's.

    The second row has the ratio of the points that were read off the paper's figure.
    """
    latency = 2 * normalised_ms(model, fit)
    ratio = _ratio_at(latency, {name: curves[name].points for name in HEADLINE})
    theirs = _ratio_at(latency, {name: paper[name] for name in HEADLINE})
    without = ratio / fit.ft_factor
    text = f"{model} at {latency:.0f} ms per token: orca(32) over ft(1,1); {without:.1f} without the factor"
    return [
        Row("fig10.order_of_magnitude", text, ratio, "about 10 or more", claim="C8", holds=without >= 10),
        Row("fig10.order_of_magnitude.points", "the same beside the points read off the paper's figure", ratio, theirs,
            abs(math.log(ratio / theirs)), claim="C8"),
    ]  # fmt: skip


def _ratio_at(latency: float, points: Mapping[str, Any]) -> float:
    rates = [throughput_along(points[name], latency) for name in HEADLINE]
    assert all(rates), f"a curve does not reach {latency:.0f} ms"
    return (rates[0] or 0.0) / (rates[1] or math.inf)
