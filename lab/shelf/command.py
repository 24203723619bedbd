"""`python -m lab shelf`: all policies of the shelf on equal loads; `python -m lab pages` writes the page."""

import argparse
import json
import resource
from collections.abc import Sequence

from lab.paper.effort import Effort
from lab.shelf import burst
from lab.shelf.flags import add_shelf_args, check_shelf_args, has_file
from lab.shelf.loads import TRACES
from lab.shelf.page import PICTURE, draw
from lab.shelf.table import COLUMNS, POLICIES, RESULT, maker, measured, shown
from orca_jax.helpers.reporting import print_table, rounded, write_file


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    add_shelf_args(parser, num_requests=500)
    parser.add_argument(
        "--burst", action="store_true", help="instead, serve a burst on a GPT-2 in real time"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="write the results to lab/results/, and docs/shelf.svg",
    )


def run(args: argparse.Namespace) -> None:
    """Measure and print the table; name the loads without a file."""
    check_shelf_args(args)
    policies = args.policy or tuple(POLICIES)
    for policy in policies:
        maker(policy)  # or an error, before the first run
    if args.burst:
        _run_burst(policies, args.record)
        return
    names = ["orca", "agents"]
    missing = list[str]()
    for name in TRACES:
        (names if has_file(name, args.traces) else missing).append(name)
    if missing:
        print(f"left out, since --traces has no file of them: {', '.join(missing)}")
    found = measured(
        names, args.num_requests, args.traces, Effort(processes=args.processes), policies
    )
    found = rounded(found | {"minutes": _processor_seconds() / 60})
    for name, levels in found["loads"].items():
        for level, each in levels.items():
            lines = {
                policy: "  ".join(map(shown, figures.values())) for policy, figures in each.items()
            }
            print_table(f"{name}, {level} of the saturation: {', '.join(COLUMNS.values())}", lines)
    if args.record:
        write_file(RESULT, (json.dumps(found) + "\n").encode())
        draw(found, PICTURE)


def _run_burst(policies: Sequence[str], is_recorded: bool) -> None:
    found = rounded(burst.measured(policies))
    lines = {
        name: "  ".join(map(shown, figures.values())) for name, figures in found["policies"].items()
    }
    print_table(f"burst of {found['tokens']} tokens: {', '.join(burst.COLUMNS.values())}", lines)
    if is_recorded:
        write_file(burst.BURST, (json.dumps(found) + "\n").encode())


def _processor_seconds() -> float:
    """Seconds of the processor that this process and its children have used."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum([each.ru_utime + each.ru_stime for each in used])
