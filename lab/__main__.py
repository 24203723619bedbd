"""`python -m lab COMMAND [flags]`: measurements around the package; `--help` lists them."""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from orca_jax.flags import FlagParser, run_program


class Command(NamedTuple):
    """A command: its module, with `add_args` and with `run`, which returns the exit status; and its line of help."""

    module: str
    help: str


COMMANDS = {
    "beyond": Command("lab.paper.beyond", "tails, sensitivities and later schedulers with the paper's workload"),
    "control": Command("lab.control_plane", "plans to another process by ZeroMQ and by a collective"),
    "fit": Command("lab.paper.held_out", "fit one pair of shares to 101B and 341B, to predict 175B"),
    "overlay": Command("lab.reproduce.overlay", "draw all figures over the paper's points on one page"),
    "pages": Command("lab.pages", "write the numbers of the pages again, from the recorded results"),
    "reproduce": Command("lab.reproduce.command", "the paper's Figures 8 to 11 and Table 1, with a verdict each"),
    "whatif": Command("lab.reproduce.whatif", "Figure 10 with other numbers and other seeds"),
    "workers": Command("lab.workers", "throughput of a pipeline over its iterations in flight"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit status."""
    words = sys.argv[1:] if argv is None else argv
    parser = FlagParser(prog="python -m lab", description="Measurements around the package.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        if name not in words[:1]:
            commands.add_parser(name, help=command.help)
            continue
        module = importlib.import_module(command.module)
        flags = commands.add_parser(name, help=command.help, description=module.__doc__)
        module.add_args(flags)
        flags.set_defaults(run=module.run)
    args = parser.parse_args(words)
    status: int = args.run(args)
    return status


if __name__ == "__main__":
    sys.exit(run_program("lab", main))
