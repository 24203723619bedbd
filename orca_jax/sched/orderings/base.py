"""The contract of an ordering: a key for each request, and a charge if the order depends on service; and its queues.

Queues are kept up to date by polling the pool, without event callbacks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Protocol

from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request, State

SPARE = 64
"""Entries of requests that have left, before they are removed."""

type Key = Callable[[Request, float], tuple[float, ...]]
type SortKey = tuple[tuple[float, ...], int]
"""A key, and the index of arrival: no two requests have the same."""


_by_arrival: Callable[[Request], int] = attrgetter("arrival_index")


class RequestQueue(Protocol):
    """Requests of one pool in an order, the most urgent first. It reads the pool without changing it."""

    def running(self, pool: RequestPool) -> Sequence[Request]:
        """The requests with rows; the last one is preempted first. Do not change the list."""
        ...

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """The requests able to get a row, lazily, since there may be thousands. Only one walk at a time.

        A preempted request is not among them while an iteration of it is in flight.
        """
        ...


class Ordering(ABC):
    """An order of requests for the scheduler `chunked`.

    The order of two running requests never changes. Otherwise two requests too large to run together could take
    each other's pages for ever. Each ordering bounds overtaking, so that no request waits for ever. Orders from outside
    (`policy.Order`) may break both rules: the guard of policies stands behind them.

    Attributes:
        reads: names of the fields of `policy.RequestView` that it needs from callers or predictors.
        charge: counts the tokens chosen for a request; a newcomer has no row yet. None: the order does not need it.
    """

    reads: frozenset[str] = frozenset()
    charge: Callable[[Request, int], None] | None = None

    @abstractmethod
    def queue(self) -> RequestQueue:
        """A new queue of the requests of one pool."""
        ...


class KeyOrdering(Ordering):
    """An order by keys; the lowest key is the most urgent.

    Attributes:
        is_static: True if the key of a request never changes; it is then asked for once.
    """

    is_static: bool = True

    @abstractmethod
    def key(self, request: Request, now: float) -> tuple[float, ...]:
        """The place of a request at `now`, in seconds on the engine's clock; equal ones are in order of arrival."""
        ...

    def queue(self) -> "KeyQueue":
        """A queue by these keys."""
        return KeyQueue(self.key, is_static=self.is_static)


class ArrivalQueue:
    """Requests in the order of arrival."""

    def running(self, pool: RequestPool) -> Sequence[Request]:
        """The requests with rows."""
        return sorted(pool.running.values(), key=_by_arrival)

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """The requests able to get a row, as the pool has them."""
        return (request for request in pool if request.is_idle)


class ArrivalCursor:
    """Finds requests to enqueue: new arrivals, and requests waiting again.

    The cost does not depend on the number of waiting requests. The owner of a queue enqueues `news`, and calls `took`
    for each dequeued request. A dequeued request is news again as soon as it waits again: either it was not
    admitted, or it ran and was preempted.
    """

    def __init__(self) -> None:
        # at most those that ran at the last poll, or were dequeued since
        self._taken: list[Request] = []
        self._num_seen = 0  # of all arrivals ever

    def news(self, pool: RequestPool) -> list[Request]:
        """Live requests able to get a row and not in a queue; each is returned once."""
        arrived = [request for request in pool.arrived_since(self._num_seen) if request.is_idle]
        self._num_seen = pool.num_arrived
        back = []
        away = []
        for request in self._taken:
            if request.state is State.FINISHED:
                continue
            if request.is_idle:
                back.append(request)
            else:
                away.append(request)
        self._taken = away
        return back + arrived[::-1]

    def took(self, request: Request) -> None:
        """Record a request as dequeued."""
        self._taken.append(request)


class KeyQueue:
    """Requests in the order of their keys, and of arrival among equals.

    With static keys a selection costs O(log n), with n waiting requests: they are in a heap. A request that left while
    it waited is removed at its turn, or when there are many of them. Keys that change are read in each selection.

    Args:
        key: takes a request, and the time in seconds.
        is_static: True if the key of a request never changes.
    """

    def __init__(self, key: Key, *, is_static: bool = True) -> None:
        self._key = key
        self._is_static = is_static
        self._ranks = _Ranks(key)
        self._heap: list[tuple[SortKey, Request]] = []
        self._cursor = ArrivalCursor()
        # the latest running requests by admission, and in order
        self._admitted: list[Request] = []
        self._running: list[Request] = []

    def running(self, pool: RequestPool) -> Sequence[Request]:
        """The requests with rows; those of static keys are sorted when they change."""
        admitted = list(pool.running.values())
        if not self._is_static:
            return self._sorted(admitted, pool)
        if admitted != self._admitted:
            self._admitted = admitted
            self._running = self._sorted(admitted, pool)
        return self._running

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """The requests able to get a row."""
        if self._is_static:
            return self._walk(pool)
        return self._sorted([request for request in pool if request.is_idle], pool)

    def together(self, pool: RequestPool) -> Sequence[Request]:
        """Running and waiting requests in one order."""
        return self._sorted(
            [request for request in pool if request.row is not None or request.is_idle], pool
        )

    def _sorted(self, requests: list[Request], pool: RequestPool) -> list[Request]:
        now = pool.now
        if not self._is_static:
            key = self._key
            return sorted(requests, key=lambda each: (key(each, now), each.arrival_index))
        self._ranks.now = now
        if len(self._ranks) > 2 * len(pool) + SPARE:
            self._ranks.forget_ended()
        return sorted(requests, key=self._ranks.__getitem__)

    def _walk(self, pool: RequestPool) -> Iterator[Request]:
        """The waiting requests from the heap."""
        ranks = self._ranks
        ranks.now = pool.now
        heap = self._heap
        for request in self._cursor.news(pool):
            heappush(heap, (ranks[request], request))
        if len(heap) > 2 * len(pool) + SPARE:
            heap[:] = [entry for entry in heap if entry[1].state is not State.FINISHED]
            heapify(heap)
            ranks.forget_ended()
        while heap:
            _, request = heappop(heap)
            if request.state is not State.FINISHED:
                self._cursor.took(request)
                yield request


class _Ranks(dict[Request, SortKey]):
    """The ranks of requests with static keys, each made when it is looked at."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self.now = 0.0

    def __missing__(self, request: Request) -> SortKey:
        rank = (self._key(request, self.now), request.arrival_index)
        self[request] = rank
        return rank

    def forget_ended(self) -> None:
        """Forget the requests that have left."""
        for request in [request for request in self if request.state is State.FINISHED]:
            del self[request]
