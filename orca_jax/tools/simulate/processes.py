"""Simulations side by side, in processes."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from orca_jax.values.errors import ConfigError


def in_processes[T, R](call: Callable[[T], R], items: Sequence[T], number: int) -> list[R]:
    """The results of a call for each item, in order.

    Args:
        call: a function of a module.
        items: its arguments; they and the results can be pickled.
        number: of processes; with one, or for one item, this process does it.

    Raises:
        ConfigError: a process cannot be started, or is killed; `param` is "jobs".
    """
    if number == 1 or len(items) == 1:
        return [call(item) for item in items]
    try:
        with ProcessPoolExecutor(number, get_context("spawn")) as processes:
            return list(processes.map(call, items))
    except BrokenProcessPool as error:
        message = "a process was killed, or could not be started (limits of memory, ulimit -u); lower jobs"
        raise ConfigError(message, param="jobs") from error
