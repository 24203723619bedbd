"""Order by deadline, the earliest first."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from orca_jax.sched.orderings.queue import WaitingQueue
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request

PATIENCE = 600.0
"""The deadline of a request without one, in seconds after its arrival."""


class EarliestDeadline:
    """The earliest deadline first; without one, a request has a deadline `PATIENCE` seconds after its arrival.

    A request is never overtaken by requests arriving after its deadline. So no request waits for ever: neither behind
    urgent requests nor, without a deadline, behind those with one. The order does not drop late requests; the caller
    that set a deadline ends its request then.
    """

    name = "deadline"
    reads_predictions: ClassVar[bool] = False

    def __init__(self) -> None:
        self._queue = WaitingQueue(_deadline)

    def running(self, pool: RequestPool) -> Sequence[Request]:
        return sorted(pool.running.values(), key=self._queue.rank)

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        return self._queue.walk(pool)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Does nothing: deadlines do not depend on service."""


def _deadline(request: Request) -> float:
    seconds = request.urgency.deadline
    return request.arrival + (PATIENCE if seconds is None else seconds)
