"""How long a device had nothing to do while there was work."""

import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable


@runtime_checkable
class Pending(Protocol):
    """An array on its way. Every `jax.Array` is one; its declaration lacks the first method."""

    def is_ready(self) -> bool:
        """Whether it is there."""
        ...

    def block_until_ready(self) -> object:
        """Wait until it is."""
        ...


class IdleWatch:
    """Adds up the time in which nothing was handed over to the device although the engine had work.

    A device says whether it is done, and not since when. So a gap counts from when it was last known to be at work:
    from the last look, or from the end of a wait for its newest result. The sum is exact where the host waits for the
    device before it hands over more, and otherwise an upper bound that looks keep close. Handing over counts as work.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._newest: Pending | None = None  # what the last program makes
        self._busy_at: float | None = None  # when the device was last known to work; None: nobody wants it to

    def look(self) -> None:
        """Note that the device is at work, if it is: half a microsecond."""
        if self._newest is not None and not self._newest.is_ready():
            self._busy_at = self._clock()

    def begin(self) -> None:
        """A program is about to be handed over."""
        if self._busy_at is not None and self._newest is not None and self._newest.is_ready():
            self.seconds += self._clock() - self._busy_at

    def handed_over(self, result: Pending) -> None:
        """It was, and `result` is there when it is done."""
        self._newest, self._busy_at = result, self._clock()

    def wait(self, result: Pending) -> None:
        """Block until `result` of any program is there; if that takes time, the device was at work until then."""
        if not result.is_ready():
            result.block_until_ready()
            self._busy_at = self._clock()
        self.look()

    def rest(self) -> None:
        """There is no work: what passes until the next program does not count."""
        self._busy_at = None
