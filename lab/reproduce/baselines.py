"""ORCA beside earlier and later schedulers, with the paper's model of 175B parameters and its workload: one table.

Each system is measured as in the paper, by the throughput at 190 ms per token, and by its latencies at two rates.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from lab.baselines import POLICIES
from lab.pages.markdown import table
from lab.paper.effort import Effort, add_processes
from lab.paper.places import Place, serve_system
from lab.paper.runs import paper_lengths, poisson
from lab.paper.sweep import point_at, saturation
from lab.paper.systems import parse_system
from lab.reproduce.blocks import RESULTS
from lab.reproduce.claims import LATENCY
from orca_jax.helpers.reporting import print_table, rounded, write_file

RESULT = RESULTS / "baselines.json"
RATES = (2.0, 5.0)
"""Requests per second of the latencies."""
SYSTEMS: Mapping[str, str] = {
    "orca(32)": "ORCA",
    "orca(128)": "ORCA",
    "prefill_first(32)": "vLLM 0.1: whole prompts first",
    "prefill_first(128)": "vLLM 0.1: whole prompts first",
    "chunked(32)": "Sarathi's chunks, 512 tokens",
    "chunked(128)": "Sarathi's chunks, 512 tokens",
    "pools(32)": "pools by output length, 32 places in all",
    "pools(96)": "pools by output length, 32 places each",
    "cells(128)": "cells of equal position",
    "padded(8)": "static batches, padded",
    "padded(32)": "static batches, padded",
    "ft(1,1)": "FasterTransformer",
    "ft(8,8)": "FasterTransformer",
}
"""The rows of the table, by system."""
EFFORT = Effort(requests=600, single=300)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_processes(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, print and record the table."""
    found = rounded(baselines(replace(EFFORT, processes=args.processes)))
    write_file(RESULT, (json.dumps(found, indent=1) + "\n").encode())
    print_table(
        "baselines: requests/s, then ms",
        {" ".join(row[:2]): "  ".join(row[2:]) for row in rows(found)},
    )
    return 0


def baselines(effort: Effort) -> dict[str, Any]:
    """The figures of all systems by name, with the number of requests."""
    found = effort.map(measure, SYSTEMS, [effort] * len(SYSTEMS))
    return {
        "requests": effort.requests,
        "latency_ms": LATENCY,
        "systems": dict(zip(SYSTEMS, found, strict=True)),
    }


def measure(name: str, effort: Effort) -> dict[str, Any]:
    """The saturation of a system, its throughput at the paper's latency, and its figures at each rate below both.

    A rate above the saturation is left out, since its latencies would only tell the length of the run.
    """
    system = parse_system(name, POLICIES)
    place = Place()
    requests = paper_lengths(effort.of(system), effort.seed)
    top = saturation(system, place, requests)
    found: dict[str, Any] = {
        "saturation_requests_per_s": top,
        "requests_per_s_at_latency": point_at(name, place, effort, LATENCY).throughput,
    }
    for rate in RATES:
        if rate < top:
            arrivals = poisson(rate, len(requests), effort.seed)
            found[f"{rate:g}"] = serve_system(system, place, requests, arrivals).figures
    return found


_FIGURES = {
    "median_normalized_latency_ms": "median",
    "p99_normalized_latency_ms": "p99",
    "p50_ttft_ms": "median TTFT",
    "p99_ttft_ms": "p99 TTFT",
}
HEAD = (
    "scheduler",
    "system",
    "saturation",
    f"at {LATENCY:.0f} ms",
    *(f"{title}, {rate:g}/s" for rate, title in product(RATES, _FIGURES.values())),
)


def rows(found: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """The rows of the table, as `HEAD`: requests/s, then ms."""
    lines = []
    for name, figures in found["systems"].items():
        rates = [
            f"{figures[key]:#.3g}"
            for key in ("saturation_requests_per_s", "requests_per_s_at_latency")
        ]
        columns = product(RATES, _FIGURES)
        times = [figures.get(f"{rate:g}", {}).get(key) for rate, key in columns]
        lines.append(
            [
                SYSTEMS[name],
                f"`{name}`",
                *rates,
                *["" if time is None else f"{time:,.0f}" for time in times],
            ]
        )
    return lines


def block() -> str:
    """The table of the recorded result, in Markdown."""
    return table(HEAD, rows(json.loads(RESULT.read_text(encoding="utf-8"))))
