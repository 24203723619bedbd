"""Tables of commands: the parser of their flags, and the run of one command with its errors on one line."""

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from orca_jax.flags import FlagParser
from orca_jax.helpers.console import lasting_output
from orca_jax.values.checks import check_new_file
from orca_jax.values.errors import OrcaError, system_message

# flags with a file for the results, written at the end
OUTPUTS = ("plot", "save", "write_trace", "csv", "timeline")


class Command(NamedTuple):
    """A command: its module, with `run`, and its line in the help.

    The function `add_args` is in the module too, or in `flags`, if the module imports much. The exit status is the
    result of `run`, or 0 if it returns None.
    """

    module: str
    help: str
    flags: str | None = None
    folders: Collection[str] = ()  # flags of `OUTPUTS` with a directory


def command_parser(
    parser: FlagParser, table: Mapping[str, Command], names: Collection[str]
) -> FlagParser:
    """Add all commands of a table to a parser, with the flags of those in `names`; only their modules are imported."""
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in table.items():
        if name not in names:
            commands.add_parser(name, help=command.help)
            continue
        flags = importlib.import_module(command.flags or command.module)
        description = command.help.capitalize() if command.flags else flags.__doc__
        chosen = commands.add_parser(name, help=command.help, description=description)
        flags.add_args(chosen)
        chosen.set_defaults(run=partial(run_module, command.module), folders=command.folders)
    return parser


def run_command(
    make_parser: Callable[[Collection[str]], FlagParser], argv: Sequence[str] | None
) -> int:
    """Run one command. Return the exit status: 1 if its report was lost, 2 if a flag is wrong.

    Args:
        make_parser: takes the names of the commands whose flags are needed.
        argv: the words of the command line; None for those of this process.
    """
    words = sys.argv[1:] if argv is None else argv
    with lasting_output() as output:
        status = _parse_and_run(make_parser(words[:1]), words)
    if output.is_lost and status == 0:
        return 1
    return status


def run_module(module: str, args: Namespace) -> int:
    """Import a module, and run its `run`; return the exit status."""
    return importlib.import_module(module).run(args) or 0


def _parse_and_run(parser: FlagParser, words: Sequence[str]) -> int:
    try:
        args = parser.parse_args(words)
        for name in OUTPUTS:
            if name not in args.folders and (path := getattr(args, name, None)) is not None:
                check_new_file(path, name)
        status: int = args.run(args)
    except OrcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:  # a directory for temporary files that cannot be written, for example
        print(f"error: {system_message(error)}", file=sys.stderr)
        return 2
    return status
