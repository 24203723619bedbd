"""Reproduce the paper's Figures 8 to 11 and Table 1, and results of later papers, by simulation, and judge each value.

A row has our value, the paper's, the error, and a verdict: PASS, FAIL, INPUT if an assumption decides the value, or
SHOWN if no tolerance was stated for it. Rows are printed as they are known. The exit status is 1 if a verdict differs
from the expected one, in either direction.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.paper.effort import Effort, add_processes
from lab.reproduce import blocks, fig8, fig9, fig10, fig11, predicted, table1
from lab.reproduce.rows import EXPECTED, Row, changed, print_rows, read_expected, shown
from lab.shelf import fairness, optimum, prefixes, ratios, stability
from orca_jax.helpers.reporting import rounded, write_file
from orca_jax.values.errors import ConfigError

FIGURES: Mapping[str, Callable[[Effort], tuple[dict[str, Any], list[Row]]]] = {
    "fig8": fig8.reproduce,
    "fig9": fig9.reproduce,
    "fig11": fig11.reproduce,
    "table1": table1.reproduce,
    "stability": stability.reproduce,
    "mc_sf": optimum.reproduce,
    "vtc": fairness.reproduce,
    "k_lpm": prefixes.reproduce,
    "ratios": ratios.reproduce,
}
NAMES = (*blocks.FIGURES, *blocks.LATER)
RESULTS = Path(__file__).parents[1] / "results"
QUICK = Effort(requests=600, single=300)
FULL = Effort(requests=2000)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "figure", choices=(*NAMES, "all"), help="figure or table of the paper, or a later paper"
    )
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK.requests} requests for each point, not 2000"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(fig10.MODELS),
        choices=fig10.MODELS,
        help="panels of Figure 10 (default: all)",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="the exit status is 1 also if a printed value differs from the recorded one",
    )
    parser.add_argument(
        "--cost",
        choices=("fitted", "tables"),
        default="fitted",
        help="tables: Figures 9b and 10 and the headline from measured kernels of --data, with nothing fitted",
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the tables of kernels")
    add_processes(parser)
    parser.add_argument(
        "--record",
        action="store_true",
        help="write the results, and the verdicts as the expected ones, into lab/",
    )


def run(args: argparse.Namespace) -> int:
    """Run the figures; print their rows. Return 1 if a verdict differs from the expected one.

    Raises:
        ConfigError: a table of kernels is missing or wrong, or `data` is not given.
    """
    if args.cost == "tables":
        if args.data is None:
            raise ConfigError("cost tables needs data, the folder of the tables", param="data")
        if args.figure != "all":
            message = "cost tables has its figures together; give all instead of a name"
            raise ConfigError(message, param="figure")
        return predicted.run(args.data, args.processes, is_recorded=args.record)
    form = "quick" if args.quick else "full"
    effort = replace(QUICK if args.quick else FULL, processes=args.processes)
    expected = read_expected()
    failures: list[str] = []
    every = NAMES if args.quick else blocks.FIGURES
    for name in every if args.figure == "all" else (args.figure,):
        start = time.monotonic()
        print(f"{name}, {form}", flush=True)
        rows: list[Row] = []
        steps = Steps(_steps(name, effort, tuple(args.models)))
        for part in steps:
            print_rows(part)
            rows += part
        found = steps.results
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
        if args.record:
            record(name, form, found, rows)
        else:
            failures += changed(rows, form, expected)
            failures += unequal(rows, name, form) if args.exact else []
    if failures:
        print("changed:\n  " + "\n  ".join(failures))
    return int(bool(failures))


def _steps(name: str, effort: Effort, models: tuple[str, ...]) -> fig10.Steps:
    """Yield the rows of a figure, as they are known; return its results."""
    if name == "fig10":
        return (yield from fig10.reproduce(effort, models))
    found, rows = FIGURES[name](effort)
    yield rows
    return found


class Steps:
    """An iterator over rows that keeps the results which its generator returns.

    Attributes:
        results: of the figure; empty before the end.
    """

    def __init__(self, steps: fig10.Steps) -> None:
        self._steps = steps
        self.results: dict[str, Any] = {}

    def __iter__(self) -> Iterator[list[Row]]:
        """Yield the rows."""
        self.results = yield from self._steps


def unequal(rows: list[Row], name: str, form: str) -> list[str]:
    """Lines about the rows whose printed values differ from the recorded ones: virtual time is exact."""
    known = json.loads((RESULTS / f"{name}-{form}.json").read_text(encoding="utf-8"))["rows"]
    found = {row.name: rounded(row.as_json()) for row in rows}
    return [
        f"{key}: {shown(row['ours'])}, recorded {shown(known.get(key, {}).get('ours'))}"
        for key, row in found.items()
        if row != known.get(key)
    ]


def record(name: str, form: str, found: Mapping[str, Any], rows: list[Row]) -> None:
    """Write the results of a figure, and its verdicts as the expected ones."""
    line = rounded({**found, "rows": {row.name: row.as_json() for row in rows}})
    RESULTS.mkdir(exist_ok=True)
    write_file(RESULTS / f"{name}-{form}.json", (json.dumps(line, indent=1) + "\n").encode())
    expected = read_expected()
    kept = {
        key: verdict
        for key, verdict in expected.get(form, {}).items()
        if not key.startswith(f"{name}.")
    }
    expected[form] = dict(sorted((kept | {row.name: row.verdict for row in rows}).items()))
    write_file(EXPECTED, (json.dumps(expected, indent=1) + "\n").encode())
