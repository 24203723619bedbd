"""The command `orca-jax`: a table of its subcommands."""

import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from orca_jax.checks import did_you_mean
from orca_jax.console import lasting_output
from orca_jax.errors import ConfigError, OrcaError, RequestError, system_message
from orca_jax.flags import COMMAND, flag_message

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


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
        "serve": Subcommand("orca_jax.serve.__main__", "start a server with OpenAI's API", "orca_jax.serve.args"),
        "generate": Subcommand("orca_jax.cli.generate", "continue a text"),
        "chat": Subcommand("orca_jax.cli.chat", "talk to a model in the terminal"),
        "batch": Subcommand("orca_jax.batch.__main__", "answer a file of requests", "orca_jax.batch.config"),
    },
    "Prepare": {
        "plan": Subcommand("orca_jax.plan.__main__", "memory and expected times of a model on devices"),
        "completion": Subcommand("orca_jax.cli.completion", "print a script for the completion of a shell"),
    },
    "Measure": {
        "bench": Subcommand("orca_jax.bench.__main__", "measure the engine and the server"),
        "timeline": Subcommand("orca_jax.timeline.__main__", "show a file of --trace-file"),
    },
}
SUBCOMMANDS = {name: found for group in GROUPS.values() for name, found in group.items()}
_HELP = ("-h", "--help")
_DEBUG = "--debug"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: the words after `orca-jax`; None for those of this process.

    Returns:
        The exit status of the subcommand; 2 if there is no such subcommand, 1 after an unexpected error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with lasting_output():
        is_debug = words[:1] == [_DEBUG]
        words = words[1:] if is_debug else words
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
        return _run(name, rest, is_debug=is_debug)


def _run(name: str, words: list[str], *, is_debug: bool) -> int:
    """Run the subcommand `name`. Without `is_debug` an error is one line."""
    try:
        status: int = importlib.import_module(SUBCOMMANDS[name].module).main(words)
        return status
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if is_debug:
            traceback.print_exc()
        else:
            print(f"error: {_one_line(error, f'{COMMAND} {_DEBUG} {name}')}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError | RequestError) else EXIT_FAILED


def _one_line(error: Exception, remedy: str) -> str:
    """The message of an error, with the next step if the error is unexpected."""
    if isinstance(error, ConfigError):
        return flag_message(error)
    if isinstance(error, OSError):
        return system_message(error)
    if isinstance(error, OrcaError):
        return str(error)
    text = str(error).partition("\n")[0]
    return f"unexpected {type(error).__name__}: {text}; {remedy} ... prints the traceback"


def _unknown(name: str) -> str:
    if name.startswith("-"):
        return f"unknown flag {name}; a subcommand comes first: {', '.join(SUBCOMMANDS)}"
    hint = did_you_mean(name, SUBCOMMANDS) or f"; the subcommands are {', '.join(SUBCOMMANDS)}"
    return f"there is no subcommand {name!r}{hint}"


def _help() -> str:
    width = max(map(len, SUBCOMMANDS))
    lines = [f"usage: {COMMAND} SUBCOMMAND [flags]", "", "Iteration-level scheduling for text generation in JAX."]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<{width}}  {found.help}" for name, found in group.items())]
    lines += [
        "",
        f"{COMMAND} SUBCOMMAND --help shows its flags. {COMMAND} --version prints the version.",
        f"{COMMAND} {_DEBUG} SUBCOMMAND ... prints the traceback of an error.",
    ]
    return "\n".join(lines) + "\n"
