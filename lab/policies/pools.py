"""Pools by predicted effort: short, medium and long requests, each kind with a batch of its own; for comparison only.

No batch has both short and long requests, so that none waits for a long one. But every pool's iteration reads all
weights.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar, Self

from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request, State
from orca_jax.sched.scheduler import Choice, SchedulerSettings, Selection, Traits

BOUNDS = (43, 86)
"""The largest predicted outputs of the first two pools: thirds of the paper's outputs of 1 to 128 tokens."""


class PoolsScheduler:
    """Pools that take turns; within each of them Algorithm 1 of the paper.

    Args:
        max_bs: places in all pools together, shared equally.
        n_workers: iterations in flight.
        bounds: the largest predicted numbers of generated tokens of all pools but the last, ascending.
    """

    traits: ClassVar[Traits] = Traits(has_reservations=True, has_workers=True)

    def __init__(self, max_bs: int, n_workers: int = 1, bounds: Sequence[int] = BOUNDS) -> None:
        num_pools = len(bounds) + 1
        assert max_bs >= num_pools, f"{max_bs} places are too few for {num_pools} pools"
        self.n_workers = n_workers
        self._bounds = bounds
        self._sizes = [(max_bs + number) // num_pools for number in range(num_pools)]
        self._next = 0  # the pool in turn

    @classmethod
    def from_settings(cls, settings: SchedulerSettings) -> Self:
        return cls(settings.max_bs, settings.n_workers)

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """The batch of the next pool with a request that can run."""
        for _ in self._sizes:
            number, self._next = self._next, (self._next + 1) % len(self._sizes)
            batch = self._batch(number, pool, kv)
            if batch:
                return Selection(batch)
        return Selection(())

    def may_return(self, request: Request) -> bool:
        """Always true: a token is delivered as soon as its iteration has returned."""
        return True

    def _batch(self, number: int, pool: RequestPool, kv: KVManager) -> Sequence[Choice]:
        """Lines 17 to 28 of Algorithm 1, for the requests of one pool."""
        batch: list[Choice] = []
        n_rsrv = kv.reserved_slots
        for request in pool:
            if request.state is State.RUNNING or bisect_left(self._bounds, request.predicted_output) != number:
                continue
            if len(batch) == self._sizes[number]:
                break
            if request.state is State.INITIATION:
                n_rsrv += kv.demand(len(request.prompt_ids), request.max_total)
                if n_rsrv > kv.capacity:
                    break
            batch.append(Choice(request, request.num_left))
        return batch
