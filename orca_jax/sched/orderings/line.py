"""Those who wait, by a key that never changes: what a selection costs does not depend on how many they are."""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from orca_jax.request import Request, State
from orca_jax.sched.orderings.watch import Watch
from orca_jax.sched.pool import RequestPool

_SPARE = 64  # entries of requests that have left, before anybody looks for them


class Line:
    """A heap of requests. Who left while it waited is dropped when its turn comes, or when there are many of them.

    Args:
        key: seconds; the least comes first, and the first to arrive where several are equal.
    """

    def __init__(self, key: Callable[[Request], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, Request]] = []
        self._watch = Watch()

    def rank(self, request: Request) -> tuple[float, int]:
        """What the order goes by; no two requests have the same."""
        return self._key(request), request.arrival_index

    def walk(self, pool: RequestPool) -> Iterator[Request]:
        """The requests that could get a row, in order. One walk at a time."""
        for request in self._watch.news(pool):
            heappush(self._heap, (*self.rank(request), request))
        if len(self._heap) > 2 * len(pool) + _SPARE:
            self._heap = [entry for entry in self._heap if entry[2].state is not State.FINISHED]
            heapify(self._heap)
        while self._heap:
            _, _, request = heappop(self._heap)
            if request.state is not State.FINISHED:
                self._watch.took(request)
                yield request
