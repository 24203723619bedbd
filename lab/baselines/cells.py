"""Batching by cells, as BatchMaker would do for a Transformer (the paper's section 7): for comparison only."""

from collections.abc import Sequence
from typing import ClassVar, Self

from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request, State
from orca_jax.sched.scheduler import Choice, SchedulerSettings, Selection
from orca_jax.values.config import Traits


class CellScheduler:
    """Batches only requests with equal cells: as many tokens before and as many to process.

    A recurrent network has the same cell at every position. A Transformer's cell has the shape of its position, so
    requests share an iteration only if their positions are equal. The first request in the order of arrival decides
    the cell, others with the same one join it.

    Args:
        max_bs: requests of an iteration.
        n_workers: iterations in flight.
        by_token: True for prompts of one token for each iteration, as BatchMaker's cells are. More requests then share
            a cell, and prompts take many iterations.
    """

    traits: ClassVar[Traits] = Traits(has_reservations=True, has_workers=True)

    def __init__(self, max_bs: int, n_workers: int = 1, by_token: bool = False) -> None:
        self.max_bs = max_bs
        self.n_workers = n_workers
        self._by_token = by_token
        self._last = -1  # arrival index of the request that decided the last cell

    @classmethod
    def from_settings(cls, settings: SchedulerSettings) -> Self:
        return cls(settings.max_bs, settings.n_workers)

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """The cell of the next request in turn, with every request at the same cell."""
        able = self._able(pool, kv)
        if not able:
            return Selection(())
        first = next((request for request in able if request.arrival_index > self._last), able[0])
        self._last = first.arrival_index
        cell = self._cell_of(first)
        same = [
            request for request in able if self._cell_of(request) == cell and request is not first
        ]
        return Selection([Choice(request, cell[1]) for request in [first, *same][: self.max_bs]])

    def _able(self, pool: RequestPool, kv: KVManager) -> Sequence[Request]:
        """Requests without an iteration in flight, with slots and a row: in order of arrival, as in Algorithm 1."""
        able = []
        n_rsrv = kv.reserved_slots
        num_rows = kv.num_free_rows
        for request in pool:
            if request.row is None:
                n_rsrv += kv.demand(len(request.prompt_ids), request.max_total)
                num_rows -= 1
                if n_rsrv > kv.capacity or num_rows < 0:
                    break
            if request.state is not State.RUNNING:
                able.append(request)
        return able

    def may_return(self, request: Request) -> bool:
        """Always true: a token is delivered as soon as its iteration has returned."""
        return True

    def _cell_of(self, request: Request) -> tuple[int, int]:
        """Tokens before the cell, and in it."""
        return request.num_computed, 1 if self._by_token else request.num_left
