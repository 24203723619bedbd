"""Static batches with padding: request-level scheduling on an engine whose batches are rectangles; for comparison only.

All prompts are as long as the longest one, and every member runs until the longest output ends. This is the usual form
of a batch of Transformers, without FasterTransformer's start at the shortest prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lab.baselines.policy import Setting
from lab.paper.gpt import EngineCost, StageCost
from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request_level import RequestLevelScheduler
from orca_jax.sched.scheduler import Choice, KnownScheduler, Selection
from orca_jax.sim.cost import IterationCost, WorkCounts


class PaddedScheduler(RequestLevelScheduler):
    """A request-level batch whose first iteration has the whole prompts.

    Attributes:
        length: tokens of a member after the last selected iteration, padding included.
        is_first: True if this iteration has the prompts.
    """

    length, is_first = 0, True
    _longest = 0  # prompt of the batch

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """The next microbatch: its whole prompts, or one token for each member."""
        selection = super().select(pool, kv)
        members = [choice.request for choice in selection.choices]
        if members:
            self.length = self._longest + members[0].num_iterations
            self.is_first = not members[0].num_iterations
        sizes = [1 if request.num_computed else len(request.prompt_ids) for request in members]
        return selection._replace(choices=list(map(Choice, members, sizes)))

    def _form_batch(self, pool: RequestPool, kv: KVManager) -> None:
        super()._form_batch(pool, kv)
        self._longest = max([len(request.prompt_ids) for request in self._batch], default=0)


@dataclass(frozen=True)
class PaddedCost:
    """The cost of an iteration whose members are all as long as the scheduler's `length`."""

    inner: StageCost
    scheduler: PaddedScheduler
    host: float = 0.0
    buckets: tuple[int, ...] = ()

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        """The seconds of the inner cost for the padded work."""
        size = work.members * self.scheduler.length
        first = WorkCounts(chunk_tokens=size)
        later = WorkCounts(increments=work.members, context=size)
        return self.inner.stages(first if self.scheduler.is_first else later, num_stages)


def make(setting: Setting) -> PaddedScheduler:
    """Make the scheduler of `padded(max_bs)`, with a microbatch for each iteration in flight."""
    return PaddedScheduler(setting.max_bs, setting.in_flight)


def padded_batches(cost: EngineCost, setting: Setting, scheduler: KnownScheduler) -> IterationCost:
    """The cost of padded batches. Attention is batched, since all members have one shape."""
    assert isinstance(scheduler, PaddedScheduler), "a scheduler of another policy"
    assert isinstance(cost, StageCost), "padded batches have fitted costs only"
    return PaddedCost(replace(cost, request=0.0), scheduler, cost.host)
