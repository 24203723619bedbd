"""`python -m orca_jax.cluster COMMAND`: keys, and a trial of several processes on one machine."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from orca_jax.cluster.keys import make_key_file
from orca_jax.cluster.launch import launch
from orca_jax.flags import FlagParser, run_program
from orca_jax.values.errors import ConfigError

_EXIT_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status."""
    parser = FlagParser(
        prog="python -m orca_jax.cluster", description="Tools for an engine over several processes."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    keygen = commands.add_parser(
        "keygen", help="write a file with new keys, for --cluster-key-file on all hosts"
    )
    keygen.add_argument("file", metavar="FILE", type=Path, help="file to write; it must not exist")
    starter = commands.add_parser("launch", help="start all processes on this machine, for trials")
    starter.add_argument(
        "--nnodes", metavar="N", type=int, required=True, help="number of processes"
    )
    starter.add_argument(
        "flags",
        metavar="-- FLAGS",
        nargs=argparse.REMAINDER,
        help="flags of orca-jax serve, after --",
    )
    args = parser.parse_args(argv)
    if args.command == "launch":
        if args.nnodes < 2:
            starter.error(f"argument --nnodes: must be at least 2, got {args.nnodes}")
        return launch(args.nnodes, args.flags[1:] if args.flags[:1] == ["--"] else args.flags)
    try:
        make_key_file(args.file)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_CONFIG
    return 0


if __name__ == "__main__":
    sys.exit(run_program("python -m orca_jax.cluster", main))
