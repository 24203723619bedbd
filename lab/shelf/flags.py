"""The flags of the commands that run a shelf of policies on equal loads."""

import argparse
from pathlib import Path

from lab.paper.effort import add_processes
from lab.shelf.loads import TRACES
from orca_jax.flags import add_number
from orca_jax.values.errors import ConfigError


def add_shelf_args(parser: argparse.ArgumentParser, num_requests: int, beside: str = "") -> None:
    """Add the flags. `num_requests` is the default of a run, and `beside` says what is measured in any case."""
    files = ", ".join(file for _, file in TRACES.values())
    parser.add_argument("--traces", type=Path, metavar="DIR", help=f"directory with {files}")
    add_number(parser, "--num-requests", num_requests, "requests of a run")
    add_processes(parser)
    parser.add_argument(
        "--policy",
        nargs="+",
        metavar="POLICY",
        help=f"names, or FILE.py:CLASS of your own{beside} (default: the whole shelf)",
    )


def check_shelf_args(args: argparse.Namespace) -> None:
    """Check the flags. Raises ConfigError: there are few requests, or a part of the shelf would be recorded."""
    if args.num_requests < 10:
        raise ConfigError(
            f"num_requests must be at least 10, got {args.num_requests}", param="num_requests"
        )
    if args.record and args.policy:
        raise ConfigError("record is for the whole shelf; leave out --policy", param="record")


def has_file(load: str, traces: Path | None) -> bool:
    """True if a directory has the trace of a load."""
    return traces is not None and (traces / TRACES[load][1]).is_file()
