"""Queues of waiting requests for orderings, kept up to date by polling the pool, without event callbacks."""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request, State

_SPARE = 64  # entries of requests that have left, before they are removed


class ArrivalCursor:
    """Finds requests to enqueue: new arrivals, and requests waiting again.

    The cost does not depend on the number of waiting requests. The owner of a queue enqueues `news`, and calls `took`
    for each dequeued request. A dequeued request is news again as soon as it waits again: either it was not
    admitted, or it ran and was preempted.
    """

    def __init__(self) -> None:
        self._taken: list[Request] = []  # at most those that ran at the last poll, or were dequeued since
        self._num_seen = 0  # of all arrivals ever

    def news(self, pool: RequestPool) -> list[Request]:
        """Live requests able to get a row and not in a queue; each is returned once."""
        arrived = [request for request in pool.arrived_since(self._num_seen) if request.is_idle]
        self._num_seen = pool.num_arrived
        back = [request for request in self._taken if request.is_idle and request.state is not State.FINISHED]
        self._taken = [r for r in self._taken if not r.is_idle and r.state is not State.FINISHED]
        return back + arrived[::-1]

    def took(self, request: Request) -> None:
        """Record a request as dequeued."""
        self._taken.append(request)


class WaitingQueue:
    """A heap of waiting requests with a fixed key; a selection costs O(log n), with n waiting requests.

    A request that left while it waited is removed at its turn, or when there are many of them.

    Args:
        key: seconds; the least comes first, and the first to arrive among equals.
    """

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, Request]] = []
        self._cursor = ArrivalCursor()

    def rank(self, request: Request) -> tuple[float, int]:
        """The sort key of a request; no two requests have the same."""
        return self._key(request), request.arrival_index

    def walk(self, pool: RequestPool) -> Iterator[Request]:
        """The requests able to get a row, in order. Only one walk at a time."""
        for request in self._cursor.news(pool):
            heappush(self._heap, (*self.rank(request), request))
        if len(self._heap) > 2 * len(pool) + _SPARE:
            self._heap = [entry for entry in self._heap if entry[2].state is not State.FINISHED]
            heapify(self._heap)
        while self._heap:
            _, _, request = heappop(self._heap)
            if request.state is not State.FINISHED:
                self._cursor.took(request)
                yield request
