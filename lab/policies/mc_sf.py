"""MC-SF, memory-constrained shortest first (Jaillet et al., arXiv 2502.07115, section 4, Algorithm 1).

Every running request goes on. Waiting requests are tried in the order of their predicted outputs: one is admitted if
at each predicted end of a running or admitted request, all tokens in memory at that time fit; the first one that does
not fit ends the admission. So memory does not run out if predictions are true, and nothing is evicted.

Prompts are processed whole, in one iteration, as in the paper. A request of s prompt tokens holds s + j - 1 tokens in
the iteration of its j-th token, since the newest one is not in the cache yet; the paper counts s + j. If predictions
were too low and pages run out, the latest resident loses its pages; the paper's section 5 clears requests at random.
A prompt above the budget of an iteration comes in chunks, and a request alone always fits.

Sorted-F (Wang, Ye and Zhou, arXiv 2508.06133) admits in the same way in another order, for prompts of different
lengths. It forms batches one after another: of those left, the set X with the least F(X) that could run together, where
F is the sum of the outputs divided by the square of the number of requests. Within a batch the shortest comes first.
The best set is hard to find: all sets of few requests are tried. Of many, sets grow in three orders as far as F falls:
by output, by all tokens, and by the tokens held times the iterations. The paper's requests all wait at the beginning;
here batches are formed again when a request arrives.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, combinations
from typing import ClassVar

from orca_jax.policy import API, Decision, PolicyView, RequestView


def _by_output(job: RequestView) -> tuple[float, int]:
    return job.predicted, job.index


def _by_tokens(job: RequestView) -> tuple[float, int]:
    return job.num_prompt + job.predicted, job.index


def _by_memory(job: RequestView) -> tuple[float, int]:
    return job.predicted * (job.num_prompt + job.predicted / 2), job.index


def f_metric(batch: Sequence[RequestView]) -> float:
    """Sorted-F's metric of a batch."""
    return sum([job.predicted for job in batch]) / len(batch) ** 2


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
            size = min(job.num_left, view.token_budget)
            while job not in evict and view.pages(job, size) > free and len(able) > 1:
                evict.append(able.pop())
                free += view.releases(evict[-1])
            if job in evict or len(run) == view.max_batch or size > budget:
                continue
            if view.pages(job, size) > free:  # those of a resident whose token is being computed
                continue
            run.append((job, size))
            free -= view.pages(job, size)
            budget -= size
        held = [self._held(job) for job in view.residents if job not in evict]
        draws = len(run)
        for job in self._waiting(view) if not evict else ():
            size = min(job.num_left, view.token_budget)
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

    def _waiting(self, view: PolicyView) -> Sequence[RequestView]:
        """The waiting jobs in the order of admission."""
        return sorted(view.waiting, key=_by_output)

    def _held(self, job: RequestView) -> tuple[int, int]:
        """Iterations until a job ends, by prediction, and its tokens before the next of them, less one."""
        generated = job.num_generated + job.num_pending
        return max(1, round(job.predicted) - generated), job.num_prompt + generated - 1

    def _fits(self, held: list[tuple[int, int]], view: PolicyView) -> bool:
        """True if the tokens fit at every end; each job wastes less than a page."""
        num_pages = view.num_pages
        assert isinstance(num_pages, int), "a model with one pool of pages"
        if len(held) == 1:
            return True
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


class SortedF(McSf):
    """Batches with the least sum of outputs by the square of their size, whose future peaks of memory fit.

    Args:
        page_size: tokens of a page, of a model with one pool of pages.
        most_exact: waiting jobs of which all sets are tried.
    """

    def __init__(self, page_size: int = 16, most_exact: int = 8) -> None:
        super().__init__(page_size)
        self._most_exact = most_exact
        self._places: dict[int, int] = {}  # of jobs in batches
        self._known: set[int] = set()  # jobs that have been seen

    def _waiting(self, view: PolicyView) -> Sequence[RequestView]:
        waiting = list(view.waiting)
        is_placed = any(job.index in self._places for job in waiting)
        if not is_placed or any(job.index not in self._known for job in waiting):
            self._form_batches(waiting, view)
        last = len(self._places)
        return sorted(
            waiting, key=lambda job: (self._places.get(job.index, last), *_by_output(job))
        )

    def _form_batches(self, waiting: Sequence[RequestView], view: PolicyView) -> None:
        """Give places to as many jobs as an iteration can have."""
        self._known.update([job.index for job in waiting])
        self._places = {}
        rest = list(waiting)
        while rest and len(self._places) < view.max_batch:
            batch = sorted(self._best_batch(rest, view), key=_by_output)
            for job in batch:
                self._places[job.index] = len(self._places)
            rest = [job for job in rest if job.index not in self._places]

    def _best_batch(self, jobs: Sequence[RequestView], view: PolicyView) -> Sequence[RequestView]:
        if len(jobs) <= self._most_exact:
            sizes = range(1, len(jobs) + 1)
            sets = chain.from_iterable(combinations(jobs, size) for size in sizes)
            batches = [batch for batch in sets if self._fits(list(map(self._held, batch)), view)]
        else:
            orders = (_by_output, _by_tokens, _by_memory)
            batches = [tuple(self._grown(jobs, order, view)) for order in orders]
        return min(batches, key=lambda batch: (f_metric(batch), -len(batch)))

    def _grown(
        self,
        jobs: Sequence[RequestView],
        order: Callable[[RequestView], tuple[float, int]],
        view: PolicyView,
    ) -> Iterator[RequestView]:
        """Yield jobs in an order, without those that do not fit or make F larger."""
        held: list[tuple[int, int]] = []
        outputs = 0.0
        for job in sorted(jobs, key=order):
            size = len(held)
            grown = (outputs + job.predicted) / (size + 1) ** 2
            if size and (grown > outputs / size**2 or size == view.max_batch):
                continue
            if self._fits([*held, self._held(job)], view):
                held.append(self._held(job))
                outputs += job.predicted
                yield job

    def ended(self, job: RequestView) -> None:
        """Forget the job."""
        self._places.pop(job.index, None)
        self._known.discard(job.index)
