"""Studies beyond the paper's figures, with its model of 175B parameters and its workload."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.baselines import POLICIES
from lab.paper.effort import Effort, add_processes
from lab.paper.gpt import LONGEST
from lab.paper.places import Place, serve_system
from lab.paper.runs import Lengths, paper_lengths, poisson
from lab.paper.sweep import saturation
from lab.paper.systems import parse_system
from orca_jax.helpers.reporting import print_table, rounded, write_file
from orca_jax.tools.bench.workload.files import read_azure

RESULT = Path(__file__).parents[1] / "results" / "beyond.json"
RATE = 5.0
"""Requests per second of the latencies: three fourths of the paper's saturation of orca(32) on 175B."""
LOAD = 0.75
"""The rate of the latencies with another workload or another model, as a share of the saturation of orca(32) there."""
PAPER = Place()


@dataclass(frozen=True)
class Study:
    """One row: a system at a place."""

    title: str
    system: str = "orca(32)"
    place: Place = PAPER


STUDIES = (
    Study("orca(32), as in the paper"),
    Study("n_slots: half of the memory", place=Place(slots=1 / 2)),
    Study("n_slots: a fourth of the memory", place=Place(slots=1 / 4)),
    Study("n_slots: an eighth of the memory", place=Place(slots=1 / 8)),
    Study("control plane: 2 ms on each stage", place=Place(control=2e-3)),
    Study("control plane: 10 ms on each stage", place=Place(control=10e-3)),
    Study("n_workers: 1 of 2 stages busy", place=Place(n_workers=1)),
    Study("n_workers: 3 in flight on 2 stages", place=Place(n_workers=3)),
    Study("chunked, budget 512: equal cohorts", "chunked(32)"),
    Study("chunked, budget 256: equal cohorts", "chunked(32)", Place(token_budget=256)),
    Study("chunked, budget 512, 3 in flight", "chunked(32)", Place(n_workers=3)),
    Study("cells of equal position, whole prompts, 32", "cells(32)"),
    Study("cells of equal position, whole prompts, 128", "cells(128)"),
    Study("cells of one token (BatchMaker), 32", "token_cells(32)"),
    Study("cells of one token (BatchMaker), 128", "token_cells(128)"),
)
HOST = 5e-3
"""Seconds of a slow host before each iteration, for the studies of its overlap with the device."""
CHECK_INS = (
    Study("101B, host of 5 ms: chunked", "chunked(32)", Place("101B", host=HOST, n_workers=1)),
    Study("101B, host of 5 ms: overlap", "chunked(32)", Place("101B", host=HOST, n_workers=2)),
    Study(
        "101B, host of 5 ms: check-ins every 4",
        "chunked(32)",
        Place("101B", host=HOST, n_workers=5, check_in_interval=4),
    ),
)
COLUMNS = {
    "saturation_requests_per_s": "saturation",
    "arrivals_per_s": "arrivals",
    "median_normalized_latency_ms": "median ms/token",
    "p99_normalized_latency_ms": "p99 ms/token",
    "p50_ttft_ms": "median TTFT",
    "p99_ttft_ms": "p99 TTFT",
    "p50_itl_ms": "median gap",
    "p99_itl_ms": "p99 gap",
}


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_processes(parser)
    parser.add_argument(
        "--trace-data", metavar="FILE", help="Azure's CSV file: answers ended by EOS"
    )


def run(args: argparse.Namespace) -> int:
    """Run and record the studies. Raises ConfigError if the file of Azure is wrong."""
    found = rounded(beyond(Effort(1000, processes=args.processes), args.trace_data))
    write_file(RESULT, (json.dumps(found, indent=1) + "\n").encode())
    return 0


def beyond(effort: Effort, azure: str | None) -> dict[str, Any]:
    """Run all studies; print and return their figures.

    Raises:
        ConfigError: the file of Azure is wrong.
    """
    requests = paper_lengths(effort.requests, effort.seed)
    found = _run(effort, STUDIES, requests, RATE)
    found |= _run(
        effort,
        CHECK_INS,
        requests,
        LOAD * saturation(parse_system("orca(32)", POLICIES), Place("101B"), requests),
    )
    if azure is not None:
        found |= _azure(effort, azure)
    width = max(map(len, found))
    head = f"{'beyond the paper: requests/s, then ms':<{width + 2}}  " + "  ".join(COLUMNS.values())
    print_table(head, {title: _cells(figures) for title, figures in found.items()})
    return found


def _cells(figures: Mapping[str, float]) -> str:
    shown = {name: f"{figures[name]:,.4g}" if name in figures else "-" for name in COLUMNS}
    return "  ".join(f"{shown[name]:>{len(head)}}" for name, head in COLUMNS.items())


def _azure(effort: Effort, path: str) -> dict[str, Any]:
    """Answers that end with EOS: a request may generate up to 1,024 tokens, and reserves slots for all of them."""
    recorded = read_azure(path, effort.requests, 1.0)
    most = LONGEST // 2
    requests = [
        Lengths(min(each.num_input, most), min(each.num_output, most), most) for each in recorded
    ]
    rate = LOAD * saturation(parse_system("orca(32)", POLICIES), Place(), requests)
    studies = [
        Study("Azure, EOS: orca(32)"),
        Study("Azure, EOS: chunked(32)", "chunked(32)"),
        Study("Azure, EOS: ft(8,8)", "ft(8,8)"),
    ]
    return _run(effort, studies, requests, rate)


def _run(
    effort: Effort, studies: Sequence[Study], requests: Sequence[Lengths], rate: float
) -> dict[str, Any]:
    rows = effort.map(
        _figures, studies, [effort] * len(studies), [requests] * len(studies), [rate] * len(studies)
    )
    return {study.title: row for study, row in zip(studies, rows, strict=True)}


def _figures(
    study: Study, effort: Effort, requests: Sequence[Lengths], rate: float
) -> Mapping[str, float]:
    system = parse_system(study.system, POLICIES)
    some = requests[: effort.of(system)]
    top = saturation(system, study.place, some)
    if top < rate:  # latencies would only tell the length of the run
        return {"saturation_requests_per_s": top}
    figures = serve_system(
        system, study.place, some, poisson(rate, len(some), effort.seed), has_gaps=True
    ).figures
    return {"saturation_requests_per_s": top, "arrivals_per_s": rate, **figures}
