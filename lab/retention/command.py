"""`python -m lab retention`: retentions on equal loads; `python -m lab pages` writes the page."""

import argparse
import json
import statistics

from lab.paper.effort import Effort
from lab.reproduce.rows import print_rows
from lab.retention.runs import BASE, RETENTIONS_SHOWN, retention_of
from lab.retention.table import PAGES, RESULT, claims, ratios, study
from lab.shelf.flags import add_shelf_args, check_shelf_args, has_file
from lab.shelf.loads import TRACES
from orca_jax.helpers.reporting import print_table, rounded, write_file


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_shelf_args(parser, num_requests=1000, beside=", beside lru")
    parser.add_argument("--record", action="store_true", help="write the results to lab/results/")


def run(args: argparse.Namespace) -> None:
    """Measure and print the tables; name the loads without a file."""
    check_shelf_args(args)
    names = tuple(dict.fromkeys([BASE, *(args.policy or RETENTIONS_SHOWN)]))
    for name in names:
        if name != RETENTIONS_SHOWN[-1]:
            retention_of(name)  # or an error, before the first run
    loads = []
    for load in PAGES:
        if load not in TRACES or has_file(load, args.traces):
            loads.append(load)
        else:
            print(f"left out, since --traces has no file of it: {load}")
    effort = Effort(processes=args.processes)
    found = rounded(study(args.num_requests, args.traces, loads, names, effort))
    for load, sizes in found["loads"].items():
        for pages, case in sizes.items():
            lines = {}
            for name in names:
                hits = statistics.fmean(case[name]["hit_rate"])
                ttft = statistics.fmean(ratios(case, name, "mean_ttft_ms"))
                tail = statistics.fmean(ratios(case, name, "p99_ttft_ms"))
                lines[name] = f"{hits:.3f}  {ttft:.3f}  {tail:.3f}"
            print_table(f"{load}, {pages} pages: hit rate, mean and p99 TTFT of lru by it", lines)
    if not args.policy:
        print_rows(claims(found))
    if args.record:
        write_file(RESULT, (json.dumps(found) + "\n").encode())
