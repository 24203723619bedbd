"""Who has to be put into a queue, by looking at the pool: nobody has to tell an ordering of each event."""

from orca_jax.request import Request, State
from orca_jax.sched.orderings.base import is_idle
from orca_jax.sched.pool import RequestPool


class Watch:
    """Finds who has arrived or come back, at a cost that does not depend on how many wait.

    Whoever keeps a queue puts `news` into it, and says `took` of each request that it takes out. A request is then
    news again as soon as it waits again: it was only looked at, or it ran and was preempted.
    """

    def __init__(self) -> None:
        self._taken: list[Request] = []  # at most those that ran at the last look, or were looked at since
        self._num_seen = 0  # of all that ever arrived

    def news(self, pool: RequestPool) -> list[Request]:
        """Live requests that could get a row and are in no queue; each is told once."""
        arrived = [request for request in pool.arrived_since(self._num_seen) if is_idle(request)]
        self._num_seen = pool.num_arrived
        back = [request for request in self._taken if is_idle(request) and request.state is not State.FINISHED]
        self._taken = [r for r in self._taken if not is_idle(r) and r.state is not State.FINISHED]
        return back + arrived[::-1]

    def took(self, request: Request) -> None:
        """The request is in the queue no longer."""
        self._taken.append(request)
