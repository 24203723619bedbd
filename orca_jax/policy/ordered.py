"""The policy of an order from outside: `chunked` with its keys, written on the protocol for policies."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from typing import ClassVar

from orca_jax.policy.protocol import API, Decision, Order, PolicyView, RequestView
from orca_jax.sched.blocks import BlockCount, not_below_zero

type _SortKey = tuple[tuple[float, ...], int]


class Ordered:
    """Increments first, then chunks of residents, then newcomers, unless a resident lacks pages.

    Residents and newcomers are chosen in the order of their keys. While a resident lacks pages, the last ones lose
    theirs. If the order preempts, residents and waiting jobs are chosen together by their keys: those behind are
    paused, and the last ones lose rows and pages that others lack. The resident admitted longest ago keeps its own.

    Args:
        order: gives the keys.
        watermark: pages to keep free when a job is admitted beside others.
    """

    api: ClassVar[int] = API
    reads: ClassVar[frozenset[str]] = frozenset()
    may_starve: ClassVar[bool] = True

    def __init__(self, order: Order, watermark: BlockCount = 0) -> None:
        self.order = order
        self.watermark = watermark
        self._known: dict[int, _SortKey] = {}  # of a static order

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Does nothing: an order reads the progress of jobs."""

    def ended(self, job: RequestView) -> None:
        """Forget the key of a job."""
        self._known.pop(job.index, None)

    def decide(self, view: PolicyView) -> Decision:
        """Residents by key, and newcomers by key as far as rows, budget and pages reach."""
        if self.order.preempts:
            return self._first(view)
        residents = sorted(view.residents, key=lambda job: self._rank(job, view.now))
        draft = _Draft(view)
        able = [job for job in residents if job.num_left]
        for job in sorted(able, key=lambda job: job.num_left > 1):
            draft.resume(job, residents)
        if not draft.is_short:
            self._admit(view, draft, residents)
        return Decision(draft.run, draft.evict)

    def _rank(self, job: RequestView, now: float) -> _SortKey:
        if not self.order.is_static:
            return self.order.key(job, now), job.index
        rank = self._known.get(job.index)
        if rank is None:
            rank = self._known[job.index] = self.order.key(job, now), job.index
        return rank

    def _admit(self, view: PolicyView, draft: "_Draft", residents: Sequence[RequestView]) -> None:
        if not draft.budget:
            return
        spare, admitted = draft.spare(residents), 0
        for job in sorted(view.waiting, key=lambda job: self._rank(job, view.now)):
            if not draft.budget:
                break
            if not job.num_left:
                continue  # for a few iterations
            if not draft.may_take(job.num_left):
                break
            is_alone = not residents and not draft.run
            room = spare if is_alone else spare - self.watermark
            if view.pages(job, job.num_left) > room:
                view.use_whole_pages(job)
            pages = view.pages(job, job.num_left)
            if admitted == view.free_rows or pages > room:
                break
            draft.choose(job, min(job.num_left, draft.budget), pages)
            spare -= pages
            admitted += 1

    def _first(self, view: PolicyView) -> Decision:
        """The first jobs by key, of residents and waiting jobs alike; of these, increments before chunks."""
        jobs = sorted([*view.residents, *view.waiting], key=lambda job: self._rank(job, view.now))
        draft, oldest = _Draft(view), next(iter(view.residents), None)
        places = {job: place for place, job in enumerate(jobs)}
        keeping = [job for job in jobs if job.is_resident and job is not oldest]
        chosen = list(islice((job for job in jobs if job.num_left), view.max_batch))
        for job in sorted(chosen, key=lambda job: job.num_left > 1):
            if job in keeping:
                keeping.remove(job)
            if job not in draft.evict and draft.may_take(job.num_left):
                draft.fit(job, keeping, bisect_left(keeping, places[job], key=places.__getitem__))
        if not draft.run and oldest is not None and oldest.num_left:
            draft.fit(oldest, [job for job in jobs if job.is_resident and job is not oldest], 0)
        return Decision(draft.run, draft.evict)


class _Draft:
    """A decision under construction."""

    def __init__(self, view: PolicyView) -> None:
        self.view = view
        self.budget = view.token_budget
        self.free = view.free_pages
        self.taken = 0 * view.free_pages
        self.run: list[tuple[RequestView, int]] = []
        self.evict: list[RequestView] = []
        self.num_draws = 0
        self.is_short = False  # a resident could not get the pages for its tokens

    def spare(self, residents: Sequence[RequestView]) -> BlockCount:
        """Pages for newcomers: the free ones without those that residents take until all known tokens are computed."""
        to_come = 0 * self.view.free_pages
        for job in residents:
            left = job.num_prompt + job.num_generated - job.num_computed
            if left > 0:
                to_come += self.view.pages(job, left)
        return self.free - not_below_zero(to_come - self.taken)

    def may_take(self, num_left: int) -> bool:
        """True if there is a place for a job with so many tokens left, or for a chunk of them."""
        if not self.budget or len(self.run) == self.view.max_batch:
            return False
        return self.num_draws < self.view.max_draws or num_left > self.budget

    def choose(self, job: RequestView, num_tokens: int, pages: BlockCount) -> None:
        """Add a job with so many tokens, which takes these pages."""
        self.run.append((job, num_tokens))
        self.num_draws += num_tokens == job.num_left
        self.budget -= num_tokens
        self.free -= pages
        self.taken += pages

    def resume(self, job: RequestView, residents: Sequence[RequestView]) -> None:
        """Choose a resident for as many tokens as budget and pages allow; evict the last ones for its pages."""
        if not self.may_take(job.num_left) or job in self.evict:
            return
        size = min(job.num_left, self.budget)
        while (pages := self.view.pages(job, size)) > self.free:
            self.is_short = True
            fitting = bisect_left(range(1, size), True, key=lambda n: self.view.pages(job, n) > self.free)
            if fitting:  # part of a chunk
                size, pages = fitting, self.view.pages(job, fitting)
                break
            victim = self._last(job, residents)
            if victim is None:
                return
            self.take_from(victim)
            if victim is job:
                return
        self.choose(job, size, pages)

    def fit(self, job: RequestView, keeping: list[RequestView], first: int) -> None:
        """Choose a job for as many tokens as budget and pages allow.

        It takes rows and pages from the end of `keeping`, down to the place `first`, unless all would not be enough.
        """
        size, admitted = min(job.num_left, self.budget), sum([not other.is_resident for other, _ in self.run])
        if self.view.pages(job, size) > sum([self.view.releases(other) for other in keeping[first:]], self.free):
            first = len(keeping)
        while True:
            has_row = job.is_resident or admitted < self.view.free_rows + len(self.evict)
            pages = self.view.pages(job, size)
            if has_row and not pages > self.free:
                self.choose(job, size, pages)
                return
            if len(keeping) <= first:
                break
            self.take_from(keeping.pop())
        size = bisect_left(range(1, size), True, key=lambda n: self.view.pages(job, n) > self.free) if has_row else 0
        if size:  # part of a chunk
            self.choose(job, size, self.view.pages(job, size))

    def take_from(self, victim: RequestView) -> BlockCount:
        """Evict a job, and drop it from the iteration; returns the pages that it gives back."""
        for place, (job, size) in enumerate(self.run):
            if job is victim:
                pages = self.view.pages(job, size)
                del self.run[place]
                self.num_draws -= size == job.num_left
                self.budget += size
                self.free += pages
                self.taken -= pages
                break
        given = self.view.releases(victim)
        self.evict.append(victim)
        self.free += given
        return given

    def _last(self, job: RequestView, residents: Sequence[RequestView]) -> RequestView | None:
        """The job to evict for `job`: the last one that is not chosen yet, possibly `job` itself.

        The first resident is never evicted: it keeps its pages and waits, since the jobs chosen before it soon need
        pages themselves.
        """
        chosen = {other.index for other, _ in self.run}
        for other in reversed(residents):
            if other is job:
                return job if self.run and job is not residents[0] else None
            if other.index not in chosen and other not in self.evict:
                return other
        return None
