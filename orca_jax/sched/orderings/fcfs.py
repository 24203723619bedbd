"""First come, first served."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from orca_jax.sched.orderings.base import by_arrival
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request


class FirstComeFirstServed:
    """The order of arrival, as in the paper; a preempted request keeps its place. No request is ever overtaken."""

    name = "fcfs"
    reads_predictions: ClassVar[bool] = False

    def running(self, pool: RequestPool) -> Sequence[Request]:
        return sorted(pool.running.values(), key=by_arrival)

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        return (request for request in pool if request.is_idle)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Does nothing: arrivals do not depend on service."""
