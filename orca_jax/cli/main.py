"""The command `orca-jax`: a table of its subcommands."""

import importlib
import sys
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from orca_jax.flags import COMMAND, DEBUG, EXIT_USAGE, run_program
from orca_jax.flags.habits import command_hint, is_habit
from orca_jax.helpers.console import lasting_output
from orca_jax.values.checks import did_you_mean


class Subcommand(NamedTuple):
    """A subcommand: its line in the help, and its modules.

    `module` has the function `main(argv) -> exit status`, and `parser_module` the function `make_parser`.
    """

    module: str
    help: str
    parser_module: str | None = None  # None: `module`

    @property
    def parser(self) -> str:
        """Name of the module with the parser."""
        return self.parser_module or self.module


GROUPS = {
    "Generate text": {
        "serve": Subcommand(
            "orca_jax.serve.__main__", "start a server with OpenAI's API", "orca_jax.serve.args"
        ),
        "generate": Subcommand("orca_jax.cli.generate", "answer or continue a text"),
        "chat": Subcommand("orca_jax.cli.chat", "talk to a model in the terminal"),
        "batch": Subcommand(
            "orca_jax.batch.__main__", "answer a file of requests", "orca_jax.batch.args"
        ),
    },
    "Prepare": {
        "plan": Subcommand(
            "orca_jax.tools.plan.__main__", "memory and expected times of a model on devices"
        ),
        "convert": Subcommand(
            "orca_jax.tools.convert.__main__",
            "write a model as an Orbax checkpoint",
            "orca_jax.tools.convert.args",
        ),
        "calibrate": Subcommand(
            "orca_jax.tools.calibrate.__main__",
            "calibrate decisions by labelled rows",
            "orca_jax.tools.calibrate.args",
        ),
        "completion": Subcommand(
            "orca_jax.cli.completion", "print a script for the completion of a shell"
        ),
    },
    "Measure": {
        "why": Subcommand("orca_jax.cli.why", "why a server computed a prompt again"),
        "bench": Subcommand("orca_jax.tools.bench.__main__", "measure the engine and the server"),
        "timeline": Subcommand("orca_jax.tools.timeline.__main__", "show a file of --trace-file"),
    },
    "Write a scheduler": {
        "check-policy": Subcommand(
            "orca_jax.tools.simulate.check_policy", "test a scheduler of your own on small cases"
        ),
        "simulate": Subcommand(
            "orca_jax.tools.simulate.__main__", "serve requests under schedulers in virtual time"
        ),
    },
}
SUBCOMMANDS = dict(chain.from_iterable(group.items() for group in GROUPS.values()))
_HELP = ("-h", "--help")
# standard output has only remarks about it
_RESULT_ELSEWHERE = frozenset({"serve", "batch", "convert"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: the words after `orca-jax`; None for those of this process.

    Returns:
        The exit status of the subcommand; 2 if there is no such subcommand, 1 after an unexpected error, or if a result
        could not be written to standard output.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with lasting_output() as output:
        status = _main(words)
    is_incomplete = output.is_lost and not _RESULT_ELSEWHERE.intersection(words[:2])
    return 1 if is_incomplete and status == 0 else status


def _main(words: list[str]) -> int:
    debug = words[:1] if words[:1] == [DEBUG] else []
    words = words[len(debug) :]
    if not words or words[0] in (*_HELP, "help"):
        print(_help(), end="")
        return 0 if words else EXIT_USAGE
    if words[0] == "--version":
        from importlib.metadata import version

        print(f"{COMMAND} {version(COMMAND)}")
        return 0
    name, *rest = words
    if name not in SUBCOMMANDS:
        print(f"error: {_unknown(name)}", file=sys.stderr)
        return EXIT_USAGE
    return _run(name, [*debug, *rest])


def _run(name: str, words: list[str]) -> int:
    """Run the subcommand `name`. Its module is imported within, so that an error there is one line too."""

    def main(words: Sequence[str] | None) -> int:
        status: int = importlib.import_module(SUBCOMMANDS[name].module).main(words)
        return status

    return run_program(name, main, words)


def _unknown(name: str) -> str:
    if is_habit(name.partition("=")[0]):
        return f"unknown flag {name}; flags of llama.cpp's server follow the subcommand: {COMMAND} serve {name} ..."
    if name.startswith("-"):
        return f"unknown flag {name}; a subcommand comes first: {', '.join(SUBCOMMANDS)}"
    if found := command_hint(name):
        return f"there is no subcommand {name!r}; {found}"
    hint = did_you_mean(name, SUBCOMMANDS) or f"; the subcommands are {', '.join(SUBCOMMANDS)}"
    return f"there is no subcommand {name!r}{hint}"


def _help() -> str:
    width = max(map(len, SUBCOMMANDS))
    lines = [
        f"usage: {COMMAND} SUBCOMMAND [flags]",
        "",
        "Iteration-level scheduling for text generation in JAX.",
    ]
    for title, group in GROUPS.items():
        lines += [
            "",
            f"{title}:",
            *(f"  {name:<{width}}  {found.help}" for name, found in group.items()),
        ]
    lines += [
        "",
        f"{COMMAND} SUBCOMMAND --help shows its flags. {COMMAND} --version prints the version.",
        f"{COMMAND} {DEBUG} SUBCOMMAND ... prints the traceback of an error.",
    ]
    return "\n".join(lines) + "\n"
