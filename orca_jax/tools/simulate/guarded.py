"""The check of a policy in a process of its own, with a limit of time for each step.

A policy may end its process, wait for ever, or change how signals are handled. Only the last message of the process
counts as success.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from orca_jax.values.errors import ConfigError, OrcaError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

WALL_SECONDS = 30.0
"""Seconds of a clock for one case, and for the import of the class: a busy machine needs some."""
MODEL_SECONDS = 1800.0
"""Seconds for the comparison on a model, which compiles."""

Begin = Callable[[str, float], None]
"""Notes the begin of a step: its name, and the seconds that it may take."""


class _CheckStep(NamedTuple):
    """A step begins."""

    name: str
    seconds: float


class _CheckEnd(NamedTuple):
    """The check has ended: with a fault, "" if there is none, or a wrong setting."""

    kind: Literal["fault", "setting"]
    text: str
    param: str | None = None


def checked(check: Callable[[Begin], str]) -> str:
    """Run a check in a process of its own, and return its fault; "" if there is none.

    Args:
        check: a function at the top of a module, or a `partial` of one. It announces each step.

    Raises:
        ConfigError: a setting is wrong.
    """
    from multiprocessing import get_context  # help starts sooner without

    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(check, theirs))
    process.start()
    theirs.close()
    step = _CheckStep("its import", WALL_SECONDS)
    try:
        while True:
            if not ours.poll(step.seconds):
                return f"{step.name} did not end within {step.seconds:g} s"
            message: _CheckStep | _CheckEnd = ours.recv()
            if isinstance(message, _CheckStep):
                step = message
            elif message.kind == "setting":
                raise ConfigError(message.text, message.param)
            else:
                return message.text
    except EOFError:
        process.join(WALL_SECONDS)
        return f"it ended the process with status {process.exitcode} in {step.name}"
    finally:
        process.kill()
        process.join()
        ours.close()


def _check(check: Callable[[Begin], str], connection: "Connection") -> None:
    """Run a check in the process, and send its steps and its end."""

    def begin(name: str, seconds: float) -> None:
        connection.send(_CheckStep(name, seconds))

    try:
        ended = _CheckEnd("fault", check(begin))
    except ConfigError as error:
        ended = _CheckEnd("setting", error.message, error.param)
    except OrcaError as error:
        ended = _CheckEnd("fault", str(error))
    connection.send(ended)
