"""Idle time: the seconds in which a device had nothing to do while the engine had work."""

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class Pending(Protocol):
    """A result still being computed. Every `jax.Array` is one, but its declaration lacks `is_ready`."""

    def is_ready(self) -> bool:
        """True if the result is there."""
        ...

    def block_until_ready(self) -> object:
        """Wait until the result is there."""
        ...


class IdleWatch:
    """Adds up the time in which the device had no program to run although the engine had work.

    The host can check if a device is done, but not since when. So an idle gap counts from the last time at which the
    device was known to be busy: from the last call of `look`, or from the end of a wait for its newest result. The sum
    is exact if the host waits for the device before each program. Otherwise it is an upper bound, kept close by
    frequent calls of `look`. The time of a dispatch counts as work.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._newest: Pending | None = None  # the result of the last program
        self._busy_at: float | None = (
            None  # the time at which the device was last known to be busy; None: there is no work
        )

    def look(self) -> None:
        """Note the time if the device is busy. This takes half a microsecond."""
        if self._newest is not None and not self._newest.is_ready():
            self._busy_at = self._clock()

    def begin(self) -> None:
        """Count the gap before a program; called just before its dispatch."""
        if self._busy_at is not None and self._newest is not None and self._newest.is_ready():
            self.seconds += self._clock() - self._busy_at

    def handed_over(self, result: Pending) -> None:
        """Note the dispatch of a program. When `result` is ready, the program is done."""
        self._newest, self._busy_at = result, self._clock()

    def wait(self, result: Pending, ready_at: float | None = None) -> None:
        """Block until `result` of any program is ready. If it was not ready before, the device was busy until now.

        `ready_at` is the time of its readiness, as another thread saw it.
        """
        if not result.is_ready():
            result.block_until_ready()
            self._busy_at = self._clock()
        elif ready_at is not None and self._busy_at is not None:
            self._busy_at = max(self._busy_at, ready_at)
        self.look()

    def rest(self) -> None:
        """Count no time until the next program, since there is no work."""
        self._busy_at = None
