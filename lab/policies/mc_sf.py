"""MC-SF, memory-constrained shortest first (Jaillet et al., arXiv 2502.07115, section 4, Algorithm 1).

Every running request goes on. Waiting requests are tried in the order of their predicted outputs: one is admitted if
at each predicted end of a running or admitted request, all tokens in memory at that time fit; the first one that does
not fit ends the admission. So memory does not run out if predictions are true, and nothing is evicted.

Prompts are processed whole, in one iteration, as in the paper. A request of s prompt tokens holds s + j - 1 tokens in
the iteration of its j-th token, since the newest one is not in the cache yet; the paper counts s + j. If predictions
were too low and pages run out, the latest resident loses its pages; the paper's section 5 clears requests at random.
"""

from itertools import accumulate
from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


class McSf:
    """Shortest predicted outputs whose future peaks of memory fit.

    Args:
        page_size: tokens of a page, of a model with one pool of pages.
    """

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset({"predicted"})
    may_starve: ClassVar[bool] = True

    def __init__(self, page_size: int = 16) -> None:
        self._page_size = page_size

    def decide(self, view: PolicyView) -> Decision:
        """All residents, then the shortest waiting jobs that fit until all have ended."""
        run: list[tuple[RequestView, int]] = []
        evict: list[RequestView] = []
        free = view.free_pages
        budget = view.token_budget
        rows = view.free_rows
        able = [job for job in view.residents if job.num_left]
        for job in list(able):
            while job not in evict and view.pages(job, job.num_left) > free and len(able) > 1:
                evict.append(able.pop())
                free += view.releases(evict[-1])
            if job in evict or len(run) == view.max_batch or job.num_left > budget:
                continue
            run.append((job, job.num_left))
            free -= view.pages(job, job.num_left)
            budget -= job.num_left
        held = [self._held(job) for job in view.residents if job not in evict]
        draws = len(run)
        for job in (
            sorted(view.waiting, key=lambda job: (job.predicted, job.index)) if not evict else ()
        ):
            size = job.num_left
            if not size:
                continue
            if not rows or len(run) == view.max_batch or draws == view.max_draws or size > budget:
                break
            if view.pages(job, size) > free or not self._fits([*held, self._held(job)], view):
                break
            held.append(self._held(job))
            run.append((job, size))
            free = free - view.pages(job, size)
            budget = budget - size
            rows -= 1
            draws += 1
        return Decision(run, evict)

    def _held(self, job: RequestView) -> tuple[int, int]:
        """Iterations until a job ends, by prediction, and its tokens before the next of them, less one."""
        generated = job.num_generated + job.num_pending
        return max(1, round(job.predicted) - generated), job.num_prompt + generated - 1

    def _fits(self, held: list[tuple[int, int]], view: PolicyView) -> bool:
        """True if the tokens fit at every end; each job wastes less than a page."""
        num_pages = view.num_pages
        assert isinstance(num_pages, int), "a model with one pool of pages"
        held = sorted(held, reverse=True)
        sums = accumulate([tokens for _, tokens in held])
        for number, ((left, _), tokens) in enumerate(zip(held, sums, strict=True), start=1):
            if tokens + number * (left + self._page_size - 1) > num_pages * self._page_size:
                return False
        return True

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Does nothing: each decision reads all jobs anew."""

    def ended(self, job: RequestView) -> None:
        """Does nothing: each decision reads all jobs anew."""
