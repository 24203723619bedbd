"""The loop of the benchmarks that run an engine in this process, in real or in virtual time."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from orca_jax.engine import Engine
from orca_jax.request import RequestUpdate
from orca_jax.sim.executor import VirtualClock


def feed(
    engine: Engine,
    arrivals: Sequence[float],
    add: Callable[[int], None],
    clock: Callable[[], float],
    wait_until: Callable[[float], None],
) -> Iterator[Sequence[RequestUpdate]]:
    """Add each request when it is due, and yield the updates of each iteration until the engine has no work left.

    Args:
        engine: an engine that reads the same clock.
        arrivals: times on that clock, in ascending order.
        add: adds the request of this index to the engine.
        clock: returns the time in seconds.
        wait_until: waits for an arrival when the engine has no work.
    """
    coming = deque(enumerate(arrivals))
    while coming or engine.has_work:
        if coming and not engine.has_work:
            wait_until(coming[0][1])
        now = clock()
        while coming and coming[0][1] <= now:
            add(coming.popleft()[0])
        if engine.has_work:
            yield engine.step()


def sleep_until(when: float) -> None:
    """Wait for a time of `time.monotonic`."""
    time.sleep(max(0.0, when - time.monotonic()))


def advance(clock: VirtualClock, when: float) -> None:
    """Move a virtual clock forward to a time; it never goes back."""
    clock.now = max(clock.now, when)
