"""Pools by predicted effort: short, medium and long requests, each kind with a batch of its own.

No paper: the idea of our own, with a negative result. No batch has both short and long requests, so that none waits for
a long one. But every pool's iteration reads all weights. Within a pool it is Algorithm 1 of ORCA (Yu et al., OSDI'22,
section 4.2): in the order of arrival, and each request is admitted only if all its tokens fit.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


class Pools:
    """Pools that take turns.

    Args:
        places: places in all pools together, shared equally.
        bounds: the largest predicted numbers of generated tokens of all pools but the last, ascending; thirds of the
            ORCA paper's outputs of 1 to 128 tokens.
    """

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset({"predicted"})
    may_starve: ClassVar[bool] = False

    def __init__(self, places: int = 32, bounds: Sequence[int] = (43, 86)) -> None:
        num_pools = len(bounds) + 1
        if places < num_pools:
            raise ValueError(
                f"places must be at least {num_pools}, one for each pool, got {places}"
            )
        self.sizes = [(places + number) // num_pools for number in range(num_pools)]
        self._bounds = bounds
        self._next = 0  # the pool in turn

    def decide(self, view: PolicyView) -> Decision:
        """The batch of the next pool with a job that can run."""
        jobs = sorted([*view.residents, *view.waiting], key=lambda job: job.index)
        for _ in self.sizes:
            number = self._next
            self._next = (self._next + 1) % len(self.sizes)
            if run := self._batch(number, jobs, view):
                return Decision(run)
        return Decision([])

    def _batch(
        self, number: int, jobs: Sequence[RequestView], view: PolicyView
    ) -> list[tuple[RequestView, int]]:
        """Lines 17 to 28 of Algorithm 1, for the jobs of one pool."""
        run: list[tuple[RequestView, int]] = []
        rows = view.free_rows
        budget = view.token_budget
        most = min(self.sizes[number], view.max_draws)
        spare = view.free_pages
        for job in view.residents:
            spare -= view.pages(job, _to_come(job))
        for job in jobs:
            if (
                not job.num_left
                or job.num_pending
                or bisect_left(self._bounds, job.predicted) != number
            ):
                continue
            if len(run) == most:
                break
            if not job.is_resident:
                spare -= view.pages(job, _to_come(job))
                rows -= 1
                if 0 * spare > spare or rows < 0:
                    break
            budget -= job.num_left
            if budget < 0:
                break
            run.append((job, job.num_left))
        return run

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Does nothing: each decision reads all jobs anew."""

    def ended(self, job: RequestView) -> None:
        """Does nothing: each decision reads all jobs anew."""


def _to_come(job: RequestView) -> int:
    """Tokens that are not in the cache yet, if the job generates as many as it may."""
    return job.num_prompt + job.max_tokens - job.num_computed
