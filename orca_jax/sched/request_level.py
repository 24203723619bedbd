"""Request-level scheduling: the baseline of the paper (section 3.1, Figures 2 and 3)."""

from collections import deque
from collections.abc import Sequence
from typing import ClassVar, Self

from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request, State
from orca_jax.sched.scheduler import Choice, Held, SchedulerSettings, Selection
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.config import SCHEDULERS, Traits


class RequestLevelScheduler:
    """A batch runs until its longest member ends, as under FasterTransformer behind a serving system.

    - Up to `max_bs` waiting requests, in order of arrival and within `n_slots`, become a batch; no request joins later.
    - The first iteration takes as many tokens from every member as the shortest prompt has; the rest of the longer
      prompts follows one token per iteration, while shorter members already generate (section 6.2).
    - An ended member keeps its place and its cost: it repeats its last token, and the result is dropped.
    - No token is delivered before the whole batch has ended. Only aborted members leave at once.
    - With `n_workers` above 1 the batch is cut into as many microbatches (Figure 8b). Each of them is one iteration,
      and they take turns in the pipeline. With `mbs` each has that many requests, and a smaller batch has fewer of
      them; without it the batch is cut into equal parts.
    """

    traits: ClassVar[Traits] = SCHEDULERS["request_level"].traits

    def __init__(self, max_bs: int, n_workers: int = 1, mbs: int | None = None) -> None:
        assert mbs is None or mbs * n_workers >= max_bs, (
            f"{n_workers} microbatches of {mbs} do not hold {max_bs}"
        )
        self.max_bs = max_bs
        self.mbs = mbs
        self.n_workers = n_workers
        self._batch: list[Request] = []
        self._microbatches: deque[list[Request]] = deque()  # the next one to run first
        self._open: list[Request] = []  # members of the batch, less some that ended
        self._shortest = 0  # prompt tokens of the batch's shortest member

    @classmethod
    def from_settings(cls, settings: SchedulerSettings) -> Self:
        return cls(settings.max_bs, settings.n_workers)

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """The next microbatch, or one of a new batch after the last member has left."""
        self._batch = [request for request in self._batch if request.state is not State.FINISHED]
        if not self._batch:
            self._form_batch(pool, kv)
        elif self._has_ended():  # its last member was aborted; the others leave first
            return Selection(())
        members = self._next_microbatch()
        choices = [
            Choice(request, 1 if request.num_computed else self._shortest) for request in members
        ]
        held: Held = "rows" if len(self._batch) == self.max_bs else "batch"
        return Selection(choices, held=held if len(pool) > len(self._batch) else None)

    def may_return(self, request: Request) -> bool:
        """True if the batch has ended, or the request was aborted."""
        return request.aborted or self._has_ended()

    def _form_batch(self, pool: RequestPool, kv: KVManager) -> None:
        reserved = kv.reserved_slots
        has_slot = pool.newcomers()
        for request in pool:
            reserved += kv.demand(len(request.prompt_ids), request.max_total)
            if len(self._batch) == self.max_bs or reserved > kv.capacity or not has_slot(request):
                break
            self._batch.append(request)
        self._open = list(self._batch)
        self._shortest = min((len(request.prompt_ids) for request in self._batch), default=0)
        size = self.mbs or max(1, ceil_div(len(self._batch), self.n_workers))
        self._microbatches = deque(
            self._batch[i : i + size] for i in range(0, len(self._batch), size)
        )

    def _next_microbatch(self) -> Sequence[Request]:
        """The members of the microbatch after the last one; none if it is in flight."""
        while self._microbatches:
            members = [
                request for request in self._microbatches[0] if request.state is not State.FINISHED
            ]
            if any([request.state is State.RUNNING for request in members]):
                return ()  # and the others too: they come back in the same order
            if members:
                self._microbatches.rotate(-1)
                return members
            self._microbatches.popleft()
        return ()

    def _has_ended(self) -> bool:
        # constant work per member on average
        while self._open and self._open[-1].finish_reason is not None:
            self._open.pop()
        return not self._open
