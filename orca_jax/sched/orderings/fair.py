"""Fair order: all tenants with waiting requests get the same number of tokens, and none more than its share of rows."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace, nlargest
from typing import ClassVar

from orca_jax.sched.orderings.base import by_arrival
from orca_jax.sched.orderings.queue import ArrivalCursor
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request, State

_SPARE = 64  # outdated entries allowed before they are removed


class FairShare:
    """Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI '24).

    Each tenant has a counter of the tokens processed for it in iterations, prompt and generated ones alike. Pages found
    in the prefix cache cost nothing. Tokens computed again after a preemption cost again. The next newcomer is the
    first request of the waiting tenant with the lowest counter. A tenant saves up nothing while it has no requests:
    when it returns, its counter starts at least at the counter of the last admission. No waiting tenant is below it.

    Rows are bounded, too, since a tenant with the lowest counter could take all of them, and hold them for long. A
    share is the number of rows divided by the tenants with requests. A tenant that has its share is passed over while
    another one waits that has less. If all waiting tenants have their share, counters decide: no row stays idle.

    The bound on tokens: while two tenants both have a request able to get a row, and none is passed over, their service
    since then differs by at most `2 * U`. U is the largest number of tokens of one tenant in all rows: `max_num_seqs`
    times the tokens of its longest request. The reason: a tenant's counter exceeds the lowest one only by tokens
    admitted while it was the lowest.

    Running requests stay in order of arrival; otherwise two tenants could take each other's pages for ever.

    Args:
        max_idle: the number of remembered counters of tenants without requests, the highest ones. A forgotten tenant
            starts like a new one, so unused names cost no memory.
    """

    name = "fair"
    reads_predictions: ClassVar[bool] = False

    def __init__(self, max_idle: int = 4096) -> None:
        self._max_idle = max_idle
        self._served: dict[str, int] = {}  # the counters, in tokens
        self._floor = 0  # the counter of the tenant that was last admitted, before it was charged
        self._queues: dict[str, list[tuple[int, Request]]] = {}  # heaps by arrival, of requests able to get a row
        self._turns: list[tuple[int, int, str]] = []  # a heap of (counter, an arrival, tenant), maybe outdated
        self._passed_over: list[tuple[int, int, str]] = []  # entries of `_turns` whose tenants have their share of rows
        self._num_queued = 0  # requests in all queues, those that left while they waited included
        self._cursor = ArrivalCursor()

    def running(self, pool: RequestPool) -> Sequence[Request]:
        return sorted(pool.running.values(), key=by_arrival)

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """The first request of the least served tenant, repeatedly; counters are read when a request is taken."""
        while self._passed_over:
            heappush(self._turns, self._passed_over.pop())
        for request in self._cursor.news(pool):
            self._join(request)
        if self._num_queued + len(self._turns) > 4 * len(pool) + _SPARE:
            self._tidy()
        if len(self._served) > 2 * (len(pool) + self._max_idle):
            self._forget(pool)
        rows = Counter([request.urgency.tenant for request in pool.running.values()])
        num_tenants = len(self._queues) + sum([tenant not in self._queues for tenant in rows])
        return self._walk(rows, pool.kv.num_rows / max(1, num_tenants))

    def charge(self, request: Request, num_tokens: int) -> None:
        tenant = request.urgency.tenant
        served = self._served.get(tenant, self._floor)
        if request.row is None:
            self._floor = served
        self._served[tenant] = served + num_tokens

    def _walk(self, rows: Counter[str], share: float) -> Iterator[Request]:
        while turns := self._turns or self._passed_over:
            counter, arrival, tenant = turns[0]
            queue = self._queues[tenant]
            if counter < self._served[tenant]:  # counters only grow: an outdated entry is too low, never too high
                heapreplace(turns, (self._served[tenant], arrival, tenant))
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

    def _join(self, request: Request) -> None:
        """Enqueue a request at its tenant, and the tenant if it had no queue."""
        tenant = request.urgency.tenant
        if tenant not in self._queues:
            self._queues[tenant] = []
            served = self._served[tenant] = max(self._floor, self._served.get(tenant, 0))
            heappush(self._turns, (served, request.arrival_index, tenant))
        heappush(self._queues[tenant], (request.arrival_index, request))
        self._num_queued += 1

    def _tidy(self) -> None:
        """Drop ended requests and empty queues before their turn."""
        queues = self._queues.values()
        waiting = [entry for queue in queues for entry in queue if entry[1].state is not State.FINISHED]
        self._queues.clear()
        self._turns.clear()
        self._num_queued = 0
        for _, request in waiting:
            self._join(request)

    def _forget(self, pool: RequestPool) -> None:
        """Drop the counters of idle tenants, except the highest ones."""
        live = {request.urgency.tenant for request in pool} | self._queues.keys()
        idle = nlargest(self._max_idle, self._served.keys() - live, key=self._served.__getitem__)
        self._served = {tenant: self._served[tenant] for tenant in (*live, *idle)}
