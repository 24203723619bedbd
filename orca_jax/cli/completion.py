"""`orca-jax completion SHELL`: print a script with the subcommands and flags for a shell."""

import argparse
import importlib
from collections.abc import Sequence

from orca_jax.flags import COMMAND, FlagParser, program

DESCRIPTION = f"""\
Print a script for the completion of subcommands and flags:

  bash: {COMMAND} completion bash > ~/.local/share/bash-completion/completions/{COMMAND}
  zsh:  {COMMAND} completion zsh > DIR/_{COMMAND}, with DIR in $fpath
  fish: {COMMAND} completion fish > ~/.config/fish/completions/{COMMAND}.fish
"""
SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
_FILES = ("FILE", "OUT", "PATH")
_FOLDERS = ("DIR", "MODEL")


def make_parser() -> FlagParser:
    """Return the parser of the flags."""
    parser = FlagParser(
        program("completion"),
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, help="shell to print the script for")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the script. Returns the exit status."""
    shell = make_parser().parse_args(argv).shell
    import shtab  # after the flags, so that help and errors come at once

    print(shtab.complete(whole_parser(), shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return the parser of `orca-jax` with those of all subcommands."""
    from orca_jax.cli.main import SUBCOMMANDS

    whole = argparse.ArgumentParser(COMMAND)
    whole.add_argument("--version", action="store_true", help="print the version")
    whole.add_argument("--debug", action="store_true", help="print the traceback of an error")
    subparsers = whole.add_subparsers()
    for name, found in SUBCOMMANDS.items():
        parser: argparse.ArgumentParser = importlib.import_module(found.parser).make_parser()
        subparsers.add_parser(name, help=found.help)
        subparsers.choices[name] = _with_paths(parser)
    return whole


def _with_paths(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Mark the values that are paths, in a parser and in those of its subcommands."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for chosen in action.choices.values():
                _with_paths(chosen)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return parser
