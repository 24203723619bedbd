"""Order by the caller's priority, with bounded overtaking."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from orca_jax.sched.orderings.queue import WaitingQueue
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request

SECONDS_PER_STEP = 10.0
"""Seconds added to the arrival of a request for each step of its priority."""


class Priority:
    """The lowest priority first, as in vLLM, and one priority in order of arrival; but waiting raises urgency.

    The key is the arrival plus `SECONDS_PER_STEP` for each step of priority. So a request is overtaken by a request of
    a priority k steps lower only if the latter arrives within `k * SECONDS_PER_STEP` after it, and never by a request
    arriving later. With `request.MAX_PRIORITY` the bound is 2000 seconds. vLLM's own order has no such bound: a stream
    of urgent requests keeps all others waiting for ever.
    """

    name = "priority"
    reads_predictions: ClassVar[bool] = False

    def __init__(self) -> None:
        self._queue = WaitingQueue(lambda request: request.arrival + SECONDS_PER_STEP * request.urgency.priority)

    def running(self, pool: RequestPool) -> Sequence[Request]:
        return sorted(pool.running.values(), key=self._queue.rank)

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        return self._queue.walk(pool)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Does nothing: priorities do not depend on service."""
