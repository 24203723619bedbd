"""First come, first served."""

from collections.abc import Iterable, Sequence

from orca_jax.sched.orderings.base import by_arrival, is_idle
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request


class FirstComeFirstServed:
    """The order of arrival, as in the paper; a preempted request keeps its place. Nobody is ever overtaken."""

    name = "fcfs"

    def running(self, pool: RequestPool) -> Sequence[Request]:
        """By arrival."""
        return sorted(pool.running.values(), key=by_arrival)

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """By arrival."""
        return (request for request in pool if is_idle(request))

    def charge(self, request: Request, num_tokens: int) -> None:
        """Changes nothing."""
