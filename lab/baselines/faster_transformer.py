"""FasterTransformer behind a serving system, the paper's baseline (section 6.2), as its engine of that time was.

Two things go beyond `orca_jax/sched/request_level.py`. Neither is in the paper.

- One output length belongs to a whole batch: it runs for the longest prompt and the longest output together, also if
  no member has both. In FasterTransformer's GPT examples of 2021 and 2022 the length of all sequences is
  `max_input_len + request_output_len`.
- Batches are computed at their full size, also if fewer requests wait. This is an assumption.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lab.baselines.policy import Setting
from lab.paper.gpt import EngineCost
from orca_jax.sched.kv import KVManager
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request, State
from orca_jax.sched.request_level import RequestLevelScheduler
from orca_jax.sched.scheduler import KnownScheduler
from orca_jax.sim.cost import IterationCost, WorkCounts
from orca_jax.values.cache_spec import ceil_div


class FasterTransformerScheduler(RequestLevelScheduler):
    """A request-level batch with one output length for all its members."""

    def __init__(self, max_bs: int, mbs: int) -> None:
        super().__init__(max_bs, ceil_div(max_bs, mbs), mbs)
        self._num_left = 0  # iterations of all microbatches

    def _form_batch(self, pool: RequestPool, kv: KVManager) -> None:
        super()._form_batch(pool, kv)
        if self._batch:
            prompts = [len(request.prompt_ids) for request in self._batch]
            outputs = [request.max_total - len(request.prompt_ids) for request in self._batch]
            self._num_left = (max(prompts) - min(prompts) + max(outputs)) * len(self._microbatches)

    def _next_microbatch(self) -> Sequence[Request]:
        members = super()._next_microbatch() if self._num_left else ()
        self._num_left -= bool(members)
        return members

    def _has_ended(self) -> bool:
        """True after the last iteration. It has returned if no member runs."""
        running = [request for request in self._batch if request.state is State.RUNNING]
        return not self._num_left and not running and super()._has_ended()


@dataclass(frozen=True)
class FullBatchCost:
    """The cost of a microbatch with places for `mbs` requests, also if some are empty."""

    inner: EngineCost
    mbs: int
    host: float = 0.0
    buckets: tuple[int, ...] = ()

    def stages(self, work: WorkCounts, num_stages: int) -> Sequence[float]:
        """The seconds of the inner cost with all places taken."""
        return self.inner.filled(work, self.mbs, num_stages)


def make(setting: Setting) -> FasterTransformerScheduler:
    """Make the scheduler of `ft(max_bs,mbs)`."""
    return FasterTransformerScheduler(setting.max_bs, setting.mbs)


def full_batches(cost: EngineCost, setting: Setting, scheduler: KnownScheduler) -> IterationCost:
    """The cost of batches at their full size."""
    return FullBatchCost(cost, setting.mbs, cost.host)
