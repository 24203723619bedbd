"""The table of retentions: all loads, sizes of the cache and seeds, and the claims of the papers beside it."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from lab.paper.effort import Effort
from lab.reproduce.rows import Row
from lab.retention.runs import BASE, BOUND, LOAD, RETENTIONS_SHOWN, measured
from lab.shelf.loads import DEVICE, MODEL

RESULT = Path(__file__).parents[1] / "results" / "retention.json"
SEEDS = (0, 1, 2)
PAGES: Mapping[str, Sequence[int]] = {
    "agents": (500, 1000),
    "mooncake": (1000, 4000),
    "azure": (500,),
}
"""Pages of the cache for each load, of 16 tokens."""
SHARES: Mapping[str, float] = {"agents": 1.0, "mooncake": 1.0, "azure": 0.4}
"""Requests of each load, by those of the command: some take longer."""


class Claim(NamedTuple):
    """A sentence of a paper, and the smallest ratio over the least recently used pages first that confirms it."""

    retention: str
    text: str
    paper: str
    key: str  # of the figures; lower values are better
    least: float


CLAIMS = (
    Claim("continuum", "mean latency of a call", "up to 2 times lower", "mean_latency_ms", 2.0),
    Claim("saecache", "mean TTFT", "1.4 to 2.7 times lower", "mean_ttft_ms", 1.4),
    Claim("saga", "mean latency of a call", "1.64 times lower", "mean_latency_ms", 1.64),
    Claim("cachewise", "pages given up", "2 to 2.6 times fewer", "lost", 2.0),
    Claim("cachewise", "mean latency of a call", "up to 3.5 times lower", "mean_latency_ms", 3.5),
)
OVER_BOUND = 1.31
"""SAGA's bound on the work over that of clairvoyance."""


def study(
    count: int, traces: Path | None, loads: Sequence[str], names: Sequence[str], effort: Effort
) -> dict[str, Any]:
    """Measure retentions on loads. `count` is the number of requests of a run."""
    cases: list[tuple[str, int]] = []
    for load in loads:
        cases += product([load], PAGES[load])
    runs = [
        (load, pages, int(count * SHARES[load]), seed, traces, names)
        for (load, pages), seed in product(cases, SEEDS)
    ]
    found = effort.map(measured, *zip(*runs, strict=True))
    table: dict[str, Any] = {}
    for (load, pages, *_), each in zip(runs, found, strict=True):
        of_case = table.setdefault(load, {}).setdefault(str(pages), {})
        for name, figures in each.items():
            columns = of_case.setdefault(name, {key: [] for key in figures})
            for key, value in figures.items():
                columns[key].append(value)
    return {
        "model": MODEL,
        "device": DEVICE,
        "requests": count,
        "seeds": len(SEEDS),
        "load": LOAD,
        "loads": table,
    }


def ratios(case: Mapping[str, Any], name: str, key: str) -> list[float]:
    """The figure of the least recently used pages first by that of a retention, for each seed: above 1 is better."""
    return [
        base / max(ours, 1e-9) for base, ours in zip(case[BASE][key], case[name][key], strict=True)
    ]


def of_the_way(case: Mapping[str, Any], name: str) -> list[float]:
    """The share of the way from the hit rate of the least recently used pages to that of clairvoyance, by seed."""
    base = case[BASE]["hit_rate"]
    most = case[BOUND]["hit_rate"]
    ours = case[name]["hit_rate"]
    return [
        (one - low) / max(high - low, 1e-9) for one, low, high in zip(ours, base, most, strict=True)
    ]


def over_bound(case: Mapping[str, Any], name: str) -> list[float]:
    """The computed prompt tokens of a retention by those of clairvoyance, for each seed."""
    pairs = zip(case[name]["computed"], case[BOUND]["computed"], strict=True)
    return [ours / bound for ours, bound in pairs]


def claims(found: Mapping[str, Any]) -> list[Row]:
    """The claims of the papers, each at the load and size of cache at which ours is best."""
    cases: dict[str, Any] = {}
    for load, sizes in found["loads"].items():
        cases |= {f"{load}, {pages} pages": case for pages, case in sizes.items()}
    rows = []
    for claim in CLAIMS:
        means = {
            where: statistics.fmean(ratios(case, claim.retention, claim.key))
            for where, case in cases.items()
        }
        where = max(means, key=lambda each: means[each])
        text = f"{claim.retention}: {claim.text}, by that of {BASE}, at its best ({where})"
        name = f"{claim.retention}.{claim.key}"
        rows.append(
            Row(
                name,
                text,
                f"{means[where]:.2f} times",
                claim.paper,
                holds=means[where] >= claim.least,
            )
        )
    over = max([statistics.fmean(over_bound(case, "saga")) for case in cases.values()])
    text = f"saga: computed prompt tokens by those of {BOUND}, at its worst"
    rows.append(
        Row(
            "saga.bound",
            text,
            f"{over:.2f} times",
            f"at most {OVER_BOUND}",
            holds=over <= OVER_BOUND,
        )
    )
    return rows


def beats(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """The retentions of each load and size with more hits than the least recently used pages first, in all seeds."""
    better: dict[str, list[str]] = {}
    for load, sizes in found["loads"].items():
        for pages, case in sizes.items():
            base = case[BASE]["hit_rate"]
            better[f"{load}, {pages}"] = [
                name
                for name in RETENTIONS_SHOWN
                if name not in (BASE, BOUND)
                and all(a > b for a, b in zip(case[name]["hit_rate"], base, strict=True))
            ]
    return better
