"""vLLM's first scheduler (0.1, 2023): whole prompts first, pages on demand, preemption.

While a waiting request fits, an iteration has new prompts alone, and every running request waits. Otherwise each
running request gets one token. If no page is free, the latest request loses its pages, and computes its tokens again
later.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Self

from orca_jax.sched.kv import KVManager
from orca_jax.sched.orderings.base import by_arrival
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.prefix import NO_HIT
from orca_jax.sched.request import Request, State
from orca_jax.sched.scheduler import Choice, SchedulerSettings, Selection, Traits

MOST_TOKENS = 2560
"""Prompt tokens of an iteration, vLLM's `max_num_batched_tokens` of that time; a longer prompt comes alone."""
WATERMARK = 0.01
"""The share of the pages that new requests leave free."""


class PrefillFirstScheduler:
    """Prompts before increments, both in order of arrival.

    Args:
        max_bs: requests of an iteration.
        n_workers: iterations in flight; the running requests are shared equally among them, as among vLLM's engines of
            a pipeline.
    """

    traits: ClassVar[Traits] = Traits(has_workers=True)

    def __init__(self, max_bs: int, n_workers: int = 1) -> None:
        self.max_bs = max_bs
        self.n_workers = n_workers

    @classmethod
    def from_settings(cls, settings: SchedulerSettings) -> Self:
        return cls(settings.max_bs, settings.n_workers)

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """New prompts; without any, increments."""
        newcomers = self._newcomers(pool, kv)
        if newcomers:
            return Selection([Choice(request, request.num_tokens) for request in newcomers])
        return self._increments(pool, kv)

    def may_return(self, request: Request) -> bool:
        """Always true: a token is delivered as soon as its iteration has returned."""
        return True

    def _newcomers(self, pool: RequestPool, kv: KVManager) -> Sequence[Request]:
        """Waiting requests, as far as rows, pages and `MOST_TOKENS` reach."""
        found: list[Request] = []
        spare = kv.num_free_blocks - (math.ceil(WATERMARK * kv.num_blocks[0]) if pool.running else 0)
        num_tokens, num_places = 0, min(self.max_bs, kv.num_free_rows)
        for request in pool:
            if not request.is_idle:
                continue
            num_tokens += request.num_tokens
            blocks = kv.needed(NO_HIT, request.num_tokens)
            if blocks > spare or len(found) == num_places or (found and num_tokens > MOST_TOKENS):
                break
            spare -= blocks
            found.append(request)
        return found

    def _increments(self, pool: RequestPool, kv: KVManager) -> Selection:
        """A token for each running request that is not in flight, and the requests to preempt for their pages."""
        running = sorted(pool.running.values(), key=by_arrival)
        ready = [request for request in running if request.state is State.INCREMENT]
        most, free = min(self.max_bs, -(-len(running) // self.n_workers)), kv.num_free_blocks
        choices: list[Choice] = []
        preempted: list[Request] = []
        while ready and len(choices) < most:
            request = ready.pop(0)
            assert request.row is not None, f"{request.request_id} does not run"
            while (blocks := kv.lacking(request.row, request.num_tokens)) > free:
                preempted.append(ready.pop() if ready else request)
                free += kv.releasable(preempted[-1].row)
                if preempted[-1] is request:
                    break
            else:
                free -= blocks
                choices.append(Choice(request, 1))
        return Selection(choices, preempted)
