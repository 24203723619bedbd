"""The errors of classes from outside, and the numbers that they return. Each error names the class."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import nan
from numbers import Real

from orca_jax.values.errors import EngineError


class PolicyError(EngineError):
    """A class from outside raised an exception, or returned something that cannot be used.

    Args:
        name: name of the class.
        problem: the reason.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name


class Interruption(BaseException):
    """An end of a call from outside of the class, such as a limit of time. It is not a fault that the class raised."""


PASSED_ON = (KeyboardInterrupt, Interruption)
"""Exceptions that leave a call of a class from outside as they are; all others become a `PolicyError`."""


def number_of(value: object) -> float:
    """Return a number that a class has returned, of any library, as a float; NaN for what is not a number."""
    if isinstance(value, Real):
        return float(value)
    return nan


@contextmanager
def calling(name: str, method: str) -> Iterator[None]:
    """Call a method of a class in this context.

    Args:
        name: name of the class.
        method: name of the method.

    Raises:
        PolicyError: the method raised an exception that is not one of `PASSED_ON`; the message has the last line.
    """
    try:
        yield
    except PASSED_ON:
        raise
    except BaseException as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        at = f" at line {place.tb_lineno}" if place is not None else ""
        problem = f"{method} raised {type(error).__name__}: {error}{at}"
        raise PolicyError(name, problem) from error
