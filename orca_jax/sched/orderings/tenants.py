"""A queue of requests by tenant, for the fair ordering."""

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from heapq import heappop, heappush, heapreplace
from typing import Protocol

from orca_jax.sched.orderings.base import SPARE, ArrivalCursor, ArrivalQueue
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request, State


class TenantCounters(Protocol):
    """A counter of each tenant, which never falls."""

    def join(self, tenant: str) -> int:
        """The counter of a tenant that gets a queue."""
        ...

    def of(self, tenant: str) -> int:
        """The counter of a tenant with a queue."""
        ...

    def forget_idle(self, pool: RequestPool, queued: Set[str]) -> None:
        """Forget tenants without requests, if there are many; those of `queued` wait."""
        ...


class TenantQueue(ArrivalQueue):
    """The first waiting request of the tenant with the lowest counter, repeatedly; running ones in order of arrival.

    A tenant that holds its share of the rows is passed over while another one waits that has less. A share is the
    number of rows divided by the tenants with requests.

    Args:
        counters: those of the tenants.
    """

    def __init__(self, counters: TenantCounters) -> None:
        self._counters = counters
        # heaps by arrival, of requests able to get a row
        self._queues: dict[str, list[tuple[int, Request]]] = {}
        # a heap of (counter, an arrival, tenant), maybe outdated
        self._turns: list[tuple[int, int, str]] = []
        # entries of `_turns` whose tenants have their share of rows
        self._passed_over: list[tuple[int, int, str]] = []
        self._num_queued = 0  # requests in all queues, those that left while they waited included
        self._cursor = ArrivalCursor()

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """The first request of the least served tenant, repeatedly."""
        while self._passed_over:
            heappush(self._turns, self._passed_over.pop())
        for request in self._cursor.news(pool):
            self._add(request)
        if self._num_queued + len(self._turns) > 4 * len(pool) + SPARE:
            self._tidy()
        self._counters.forget_idle(pool, self._queues.keys())
        rows = Counter([request.urgency.tenant for request in pool.running.values()])
        num_tenants = len(self._queues) + sum([tenant not in self._queues for tenant in rows])
        return self._walk(rows, pool.kv.num_rows / max(1, num_tenants))

    def _walk(self, rows: Counter[str], share: float) -> Iterator[Request]:
        while turns := self._turns or self._passed_over:
            before, arrival, tenant = turns[0]
            queue = self._queues[tenant]
            counter = self._counters.of(tenant)
            # counters only grow: an outdated entry is too low, never too high
            if before < counter:
                heapreplace(turns, (counter, arrival, tenant))
            elif not queue:
                heappop(turns)
                del self._queues[tenant]
            elif turns is self._turns and rows[tenant] >= share:
                heappush(self._passed_over, heappop(turns))
            else:
                _, request = heappop(queue)
                self._num_queued -= 1
                if request.state is not State.FINISHED:
                    self._cursor.took(request)
                    rows[tenant] += 1
                    yield request

    def _add(self, request: Request) -> None:
        """Enqueue a request at its tenant, and the tenant if it had no queue."""
        tenant = request.urgency.tenant
        if tenant not in self._queues:
            self._queues[tenant] = []
            heappush(self._turns, (self._counters.join(tenant), request.arrival_index, tenant))
        heappush(self._queues[tenant], (request.arrival_index, request))
        self._num_queued += 1

    def _tidy(self) -> None:
        """Drop ended requests and empty queues before their turn."""
        waiting = []
        for queue in self._queues.values():
            waiting += [request for _, request in queue if request.state is not State.FINISHED]
        self._queues.clear()
        self._turns.clear()
        self._num_queued = 0
        for request in waiting:
            self._add(request)
