"""Names of the programs and their flags, and their errors as one line."""

import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from orca_jax.values.errors import ConfigError, OrcaError, RequestError, system_message

COMMAND = "orca-jax"
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
DEBUG = "--debug"
_OF_MODEL = tuple(f"{name}.json: " for name in ("config", "generation_config", "mapping"))


def program(name: str) -> str:
    """Return the subcommand `name` of the command line: of `orca-jax`, or of `python -m orca_jax`."""
    command = COMMAND if Path(sys.argv[0]).name == COMMAND else "python -m orca_jax"
    return f"{command} {name}"


def flag_of(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"


def flag_message(error: ConfigError) -> str:
    """Return the message of an error, after its flag if there is one: `--model` for keys of the model's files."""
    if error.param is None or error.message.startswith("--"):
        return error.message
    name = "model" if error.message.startswith(_OF_MODEL) else error.param
    return f"{flag_of(name)}: {error.message}"


def run_program(
    name: str, main: Callable[[Sequence[str] | None], int], argv: Sequence[str] | None = None
) -> int:
    """Run a part of the command line, with each error as one line, or as a traceback if the first flag is `--debug`.

    Args:
        name: the subcommand of `orca-jax`, or the whole command of another program, such as "python -m lab".
        main: takes the flags, and returns the exit status.
        argv: the flags; None for those of this process.

    Returns:
        The exit status: that of `main`; 2 if a setting is wrong, 130 after Ctrl-C, and 1 after another error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    is_debug = words[:1] == [DEBUG]
    # the package has set it while it was imported
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main(words[is_debug:])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if is_debug:
            traceback.print_exc()
        else:
            debug = f"{name} {DEBUG}" if name.startswith("python ") else f"{COMMAND} {DEBUG} {name}"
            print(f"error: {_one_line(error, debug)}", file=sys.stderr)
        is_usage = isinstance(error, ConfigError | RequestError) or _is_lack_of_threads(error)
        return EXIT_USAGE if is_usage else EXIT_FAILED


def _is_lack_of_threads(error: Exception) -> bool:
    # no class of its own
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"


def _one_line(error: Exception, remedy: str) -> str:
    """The message of an error, with the next step if the error is unexpected."""
    if isinstance(error, ConfigError):
        return flag_message(error)
    if isinstance(error, OSError):
        return system_message(error, has_remedy=True)
    if isinstance(error, OrcaError):
        return str(error)
    if _is_lack_of_threads(error):
        return "the system starts no more threads; raise the limit of processes (ulimit -u, or pids of the container)"
    text = str(error).partition("\n")[0]
    return f"unexpected {type(error).__name__}: {text}; {remedy} ... prints the traceback"
