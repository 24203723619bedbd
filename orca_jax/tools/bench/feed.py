"""The driver of simulations, and of benchmarks that run an engine in this process: in real or in virtual time."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Self

from orca_jax.engine import Engine
from orca_jax.sim.executor import SimExecutor, VirtualClock
from orca_jax.values.request import RequestUpdate
from orca_jax.values.step import Handle


@dataclass(frozen=True)
class Drive:
    """An engine with its clock, and the ways to wait on it.

    Attributes:
        engine: reads the same clock.
        clock: returns the time in seconds.
        wait_until: waits for an arrival when the engine has no work.
        await_until: waits for an iteration or the next arrival, while there is room for one more iteration; returns
            True if the iteration has ended. None: the next request to arrive waits for the iteration.
    """

    engine: Engine
    clock: Callable[[], float]
    wait_until: Callable[[float], None]
    await_until: Callable[[Handle, float], bool] | None = None

    @classmethod
    def in_virtual_time(cls, engine: Engine, executor: SimExecutor, clock: VirtualClock) -> Self:
        """An engine whose time passes on a clock of its executor alone."""

        def wait_until(when: float) -> None:
            clock.now = max(clock.now, when)

        return cls(engine, clock, wait_until, executor.wait_until)

    @classmethod
    def in_real_time(cls, engine: Engine) -> Self:
        """An engine on the clock `time.monotonic`."""
        return cls(engine, time.monotonic, sleep_until)

    def serve(
        self,
        arrivals: Sequence[float],
        add: Callable[[int, float], None],
        follows: Sequence[int | None] = (),
    ) -> Iterator[Sequence[RequestUpdate]]:
        """Add each request when it is due, and yield the updates of each iteration until the engine has no work left.

        Args:
            arrivals: time of each request on the clock; if it follows another request, seconds after the end of that.
            add: adds a request to the engine, given its index, and the time at which it was due.
            follows: index of the request whose end each request waits for, or None; empty: none waits for another.
                The id of a request in the engine is then its index.
        """
        engine = self.engine
        coming, followers = _by_cause(arrivals, follows)

        def wait_for(handle: Handle) -> bool:
            assert self.await_until is not None
            return self.await_until(handle, coming[0][0] if coming else math.inf)

        wait = None if self.await_until is None else wait_for
        while coming or engine.has_work:
            if coming and not engine.has_work:
                self.wait_until(coming[0][0])
            now = self.clock()
            while coming and coming[0][0] <= now:
                due, index = heappop(coming)
                add(index, due)
            if not engine.has_work:
                continue
            updates = engine.step(wait)
            for index in _released(followers, updates):
                heappush(coming, (self.clock() + arrivals[index], index))
            yield updates


def _by_cause(
    arrivals: Sequence[float], follows: Sequence[int | None]
) -> tuple[list[tuple[float, int]], dict[str, list[int]]]:
    """Return a heap of the requests that come at a time, and those that follow others by the ids of these."""
    coming: list[tuple[float, int]] = []
    followers: dict[str, list[int]] = {}
    for index, first in enumerate(follows or [None] * len(arrivals)):
        if first is None:
            coming.append((arrivals[index], index))
        else:
            followers.setdefault(str(first), []).append(index)
    heapify(coming)
    return coming, followers


def _released(
    followers: Mapping[str, Sequence[int]], updates: Sequence[RequestUpdate]
) -> Iterator[int]:
    """Yield the requests that follow those that have ended."""
    if not followers:
        return
    for update in updates:
        if update.finish_reason is not None:
            yield from followers.get(update.request_id, ())


def sleep_until(when: float) -> None:
    """Wait for a time of `time.monotonic`."""
    time.sleep(max(0.0, when - time.monotonic()))
