"""Whoever will be done soonest comes first, within bounds."""

from collections.abc import Iterable, Sequence

from orca_jax.sched.orderings.queue import WaitingQueue
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request

SECONDS_PER_TOKEN = 0.5
"""By how much later a request counts as arrived, for each token that it is predicted to generate."""


class ShortestFirst:
    """The least predicted output first, as `Request.predicted_output` says; but waiting makes more urgent.

    A request counts as if it had arrived `SECONDS_PER_TOKEN` later for each token that it is predicted to generate. So
    one of p tokens is overtaken by one of q only if that arrives within `SECONDS_PER_TOKEN * (p - q)` after it, and by
    nobody that arrives `SECONDS_PER_TOKEN * (p - 1)` after it or later: since p is at most the client's `max_tokens`, a
    caller knows what its own bound may cost it. Plain shortest-first has no such bound.

    The place never changes, so a request that runs is as far back as its whole output, not what is left of it: two that
    do not fit together could else take each other's pages for ever. Nobody is interrupted for a shorter one; the order
    says who is admitted, and who gives pages up where they run out. Prompts do not count: they are processed in chunks
    beside the increments of all others.
    """

    name = "shortest"

    def __init__(self) -> None:
        self._queue = WaitingQueue(lambda request: request.arrival + SECONDS_PER_TOKEN * request.predicted_output)

    def running(self, pool: RequestPool) -> Sequence[Request]:
        """By the same key."""
        return sorted(pool.running.values(), key=self._queue.rank)

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """By arrival, moved by the predicted output."""
        return self._queue.walk(pool)

    def charge(self, request: Request, num_tokens: int) -> None:
        """Changes nothing."""
