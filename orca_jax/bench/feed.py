"""The loop of simulations, and of benchmarks that run an engine in this process, in real or in virtual time."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop

from orca_jax.engine import Engine
from orca_jax.request import RequestUpdate
from orca_jax.sim.executor import VirtualClock
from orca_jax.step import Handle


def in_order(times: Sequence[float]) -> list[tuple[float, int]]:
    """Return ascending times with their indices."""
    return [(when, index) for index, when in enumerate(times)]


def feed(
    engine: Engine,
    coming: list[tuple[float, int]],
    add: Callable[[int], None],
    clock: Callable[[], float],
    wait_until: Callable[[float], None],
    await_until: Callable[[Handle, float], bool] | None = None,
) -> Iterator[Sequence[RequestUpdate]]:
    """Add each request when it is due, and yield the updates of each iteration until the engine has no work left.

    Args:
        engine: an engine that reads the same clock.
        coming: times on that clock, each with the index of a request: a heap, to which the caller may push more.
        add: adds the request of this index to the engine.
        clock: returns the time in seconds.
        wait_until: waits for an arrival when the engine has no work.
        await_until: waits for an iteration or the next arrival, while there is room for one more iteration; returns
            True if the iteration has ended. None: the next request to arrive waits for the iteration.
    """

    def wait_for(handle: Handle) -> bool:
        assert await_until is not None
        return await_until(handle, coming[0][0] if coming else math.inf)

    while coming or engine.has_work:
        if coming and not engine.has_work:
            wait_until(coming[0][0])
        now = clock()
        while coming and coming[0][0] <= now:
            add(heappop(coming)[1])
        if engine.has_work:
            yield engine.step(None if await_until is None else wait_for)


def sleep_until(when: float) -> None:
    """Wait for a time of `time.monotonic`."""
    time.sleep(max(0.0, when - time.monotonic()))


def advance(clock: VirtualClock, when: float) -> None:
    """Move a virtual clock forward to a time; it never goes back."""
    clock.now = max(clock.now, when)
