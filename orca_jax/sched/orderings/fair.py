"""Every tenant gets the same number of tokens, as long as it wants them."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush, heapreplace, nlargest

from orca_jax.sched.orderings.base import by_arrival
from orca_jax.sched.orderings.queue import ArrivalCursor
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request, State

_SPARE = 64  # entries that mean nothing any more, before anybody looks for them


class FairShare:
    """Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI '24).

    Each tenant has a counter of the tokens that iterations processed for it: prompts and generated ones alike, pages
    that were found cost nothing, and what is computed again after a preemption costs again. The next newcomer is the
    first request of the waiting tenant with the least counter. A tenant that comes back after idling starts at least
    at the counter at which a newcomer was last admitted, which no waiting tenant is below: nobody saves up its share.

    The bound: while two tenants both have a request that could get a row, what they were served since then differs by
    at most `2 * U`, where U is what all rows can hold of one tenant: `max_num_seqs` times the tokens of its longest
    request. For a tenant's counter exceeds the least one only by what was admitted when it was the least.

    Running requests stay in order of arrival, or two tenants could take each other's pages for ever.

    Args:
        max_idle: tenants without requests whose counters are remembered, the highest of them. A forgotten one starts
            like a new one, so that names that nobody uses again cost no memory.
    """

    name = "fair"

    def __init__(self, max_idle: int = 4096) -> None:
        self._max_idle = max_idle
        self._served: dict[str, int] = {}  # the counters, in tokens
        self._floor = 0  # the counter of the tenant that was last admitted, before it was charged
        self._queues: dict[str, list[tuple[int, Request]]] = {}  # heaps by arrival, of those who could get a row
        self._turns: list[tuple[int, int, str]] = []  # a heap of (counter, an arrival, tenant) as they once were
        self._num_queued = 0  # requests in all queues, those that left while they waited included
        self._cursor = ArrivalCursor()

    def running(self, pool: RequestPool) -> Sequence[Request]:
        """By arrival."""
        return sorted(pool.running.values(), key=by_arrival)

    def waiting(self, pool: RequestPool) -> Iterable[Request]:
        """Of the least served tenant the first, as counters are when it is asked for."""
        for request in self._cursor.news(pool):
            self._join(request)
        if self._num_queued + len(self._turns) > 4 * len(pool) + _SPARE:
            self._tidy()
        if len(self._served) > 2 * (len(pool) + self._max_idle):
            self._forget(pool)
        return self._walk()

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count."""
        tenant = request.urgency.tenant
        served = self._served.get(tenant, self._floor)
        if request.row is None:
            self._floor = served
        self._served[tenant] = served + num_tokens

    def _walk(self) -> Iterator[Request]:
        while self._turns:
            counter, arrival, tenant = self._turns[0]
            queue = self._queues[tenant]
            if counter < self._served[tenant]:  # counters only grow, so the least of the old ones is looked at first
                heapreplace(self._turns, (self._served[tenant], arrival, tenant))
            elif not queue:
                heappop(self._turns)
                del self._queues[tenant]
            else:
                _, request = heappop(queue)
                self._num_queued -= 1
                if request.state is not State.FINISHED:
                    self._cursor.took(request)
                    yield request

    def _join(self, request: Request) -> None:
        """Put a request into its tenant's queue, which may have been empty."""
        tenant = request.urgency.tenant
        if tenant not in self._queues:
            self._queues[tenant] = []
            served = self._served[tenant] = max(self._floor, self._served.get(tenant, 0))
            heappush(self._turns, (served, request.arrival_index, tenant))
        heappush(self._queues[tenant], (request.arrival_index, request))
        self._num_queued += 1

    def _tidy(self) -> None:
        """Drop requests that have left, and queues that are empty, before their turn comes."""
        queues = self._queues.values()
        waiting = [entry for queue in queues for entry in queue if entry[1].state is not State.FINISHED]
        self._queues.clear()
        self._turns.clear()
        self._num_queued = 0
        for _, request in waiting:
            self._join(request)

    def _forget(self, pool: RequestPool) -> None:
        """Drop the counters of tenants that are idle, but the highest."""
        live = {request.urgency.tenant for request in pool} | self._queues.keys()
        idle = nlargest(self._max_idle, self._served.keys() - live, key=self._served.__getitem__)
        self._served = {tenant: self._served[tenant] for tenant in (*live, *idle)}
