"""What the caller calls urgent comes first, within bounds."""

from collections.abc import Iterable, Sequence

from orca_jax.sched.orderings.queue import WaitingQueue
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request

SECONDS_PER_STEP = 10.0
"""By how much later a request counts as arrived, for each step of its priority."""


class Priority:
    """The lowest priority first, as in vLLM, and one class in order of arrival; but waiting makes more urgent.

    A request counts as if it had arrived `SECONDS_PER_STEP` later for each step of its priority. So it is overtaken by
    a request of a priority that is k steps lower only if that one arrives within `k * SECONDS_PER_STEP` after it, and
    by nobody that arrives later: with `request.MAX_PRIORITY` that is 2000 seconds at most. vLLM's own order has no
    such bound, and a stream of urgent requests keeps all others waiting for ever.
    """

    name = "priority"

    def __init__(self) -> None:
        self._queue = WaitingQueue(lambda request: request.arrival + SECONDS_PER_STEP * request.urgency.priority)

    def running(self, pool: RequestPool) -> Sequence[Request]:
        """By the same key."""
        return sorted(pool.running.values(), key=self._queue.rank)

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """By arrival, moved by priority."""
        return self._queue.walk(pool)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Changes nothing."""
