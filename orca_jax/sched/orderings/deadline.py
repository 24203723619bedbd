"""Whoever must be done first comes first."""

from collections.abc import Iterable, Sequence

from orca_jax.sched.orderings.queue import WaitingQueue
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request

PATIENCE = 600.0
"""Seconds after its arrival at which a request without a deadline should be done."""


class EarliestDeadline:
    """The earliest deadline first; a request without one counts as if it had one `PATIENCE` seconds after its arrival.

    A request is overtaken by nobody that arrives after its deadline, so nobody waits for ever: neither for those in a
    hurry, nor, without a deadline, for those with one. The order does not give up those that will be late; whoever set
    a deadline ends the request then.
    """

    name = "deadline"

    def __init__(self) -> None:
        self._queue = WaitingQueue(_deadline)

    def running(self, pool: RequestPool) -> Sequence[Request]:
        """By deadline."""
        return sorted(pool.running.values(), key=self._queue.rank)

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """By deadline."""
        return self._queue.walk(pool)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Changes nothing."""


def _deadline(request: Request) -> float:
    seconds = request.urgency.deadline
    return request.arrival + (PATIENCE if seconds is None else seconds)
