"""Fair order: all tenants with waiting requests get the same number of tokens, and none more than its share of rows."""

from collections.abc import Set
from heapq import nlargest

from orca_jax.sched.orderings.base import Ordering
from orca_jax.sched.orderings.tenants import TenantQueue
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request


class FairShare(Ordering):
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

    reads = frozenset({"tenant"})

    def __init__(self, max_idle: int = 4096) -> None:
        self._max_idle = max_idle
        self._served: dict[str, int] = {}  # the counters, in tokens
        self._floor = 0  # the counter of the tenant that was last admitted, before it was charged

    def charge(self, request: Request, num_tokens: int) -> None:
        """Count tokens for the tenant of a request."""
        tenant = request.urgency.tenant
        served = self._served.get(tenant, self._floor)
        if request.row is None:
            self._floor = served
        self._served[tenant] = served + num_tokens

    def queue(self) -> TenantQueue:
        """A queue for each tenant, and shares of the rows."""
        return TenantQueue(self)

    def join(self, tenant: str) -> int:
        """The counter of a tenant that gets a queue: what it was before, or that of the last admission."""
        served = max(self._floor, self._served.get(tenant, 0))
        self._served[tenant] = served
        return served

    def of(self, tenant: str) -> int:
        """The counter of a tenant with a queue."""
        return self._served[tenant]

    def forget_idle(self, pool: RequestPool, queued: Set[str]) -> None:
        """Drop the counters of idle tenants, except the highest ones."""
        if len(self._served) <= 2 * (len(pool) + self._max_idle):
            return
        live = {request.urgency.tenant for request in pool} | queued
        idle = nlargest(self._max_idle, self._served.keys() - live, key=self._served.__getitem__)
        self._served = {tenant: self._served[tenant] for tenant in (*live, *idle)}
