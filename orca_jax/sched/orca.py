"""Iteration-level scheduling: Algorithm 1 of the paper, exactly."""

from typing import ClassVar, Self

from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request, State
from orca_jax.sched.scheduler import Choice, Held, SchedulerSettings, Selection
from orca_jax.values.config import SCHEDULERS, Traits


class OrcaScheduler:
    """`Select` of Algorithm 1 (section 4.2). The numbers are the paper's lines; lines 1-16 are the engine's step.

    First come, first served at the level of iterations: an earlier request has never run fewer iterations than a
    later one. So the admitted requests are a prefix of the order of arrival, and the break in line 25 never
    holds back a running request.
    """

    traits: ClassVar[Traits] = SCHEDULERS["orca"].traits

    def __init__(self, max_bs: int, n_workers: int = 1) -> None:
        self.max_bs = max_bs
        self.n_workers = n_workers

    @classmethod
    def from_settings(cls, settings: SchedulerSettings) -> Self:
        return cls(settings.max_bs, settings.n_workers)

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """Up to `max_bs` requests without an iteration in flight, in order of arrival."""
        batch: list[Choice] = []  # 18
        n_rsrv = kv.reserved_slots
        held: Held | None = None
        has_slot = pool.newcomers()
        for request in pool:  # 20, 21: in order of arrival
            if request.state is State.RUNNING:  # 19
                continue
            if len(batch) == self.max_bs:  # 22
                held = "rows"
                break
            if request.state is State.INITIATION:  # 23
                n_rsrv += kv.demand(len(request.prompt_ids), request.max_total)  # 24, 26
                # 25: break, not continue, or a long request could wait for ever
                if n_rsrv > kv.capacity:
                    held = "pages"
                    break
                if request.row is None and not has_slot(request):
                    held = "adapters"
                    break
            batch.append(Choice(request, request.num_left))  # 27
        return Selection(batch, held=held)  # 28

    def may_return(self, request: Request) -> bool:
        """Always true: a token is delivered as soon as its iteration has returned."""
        return True
