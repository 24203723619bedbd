"""The policy of an order from outside: `chunked` with its keys, written on the protocol for policies."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from typing import ClassVar

from orca_jax.policy.protocol import API, Decision, Order, PolicyView, RequestView
from orca_jax.sched.blocks import BlockCount, not_below_zero


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
        self._known = _Ranks(order)
        self._residents: tuple[Sequence[RequestView], list[RequestView]] = ((), [])  # the latest ones, and sorted

    def started(self, job: RequestView, num_tokens: int) -> None:
        """Does nothing: an order reads the progress of jobs."""

    def ended(self, job: RequestView) -> None:
        """Forget the key of a job."""
        self._known.pop(job, None)

    def decide(self, view: PolicyView) -> Decision:
        """Residents by key, and newcomers by key as far as rows, budget and pages reach."""
        if self.order.preempts:
            return self._first(view)
        known, residents = self._residents
        if not (self.order.is_static and view.residents == known):
            residents = self._sorted(view.residents, view.now)
            self._residents = view.residents, residents
        draft, lefts = _Draft(view), [(job, left) for job in residents if (left := job.num_left)]
        chunks = [each for each in lefts if each[1] > 1]
        increments = [each for each in lefts if each[1] == 1] if chunks else lefts
        if not draft.resumes(increments):
            chunks = [*increments, *chunks]
        for job, left in chunks:
            draft.resume(job, left, residents)
        if draft.budget and view.free_rows and not draft.is_short:
            self._admit(view, draft, residents)
        return Decision(draft.run, draft.evict)

    def _sorted(self, jobs: Iterable[RequestView], now: float) -> list[RequestView]:
        if self.order.is_static:
            self._known.now = now
            return sorted(jobs, key=self._known.__getitem__)
        return sorted(jobs, key=lambda job: (self.order.key(job, now), job.index))

    def _admit(self, view: PolicyView, draft: "_Draft", residents: Sequence[RequestView]) -> None:
        waiting = self._sorted(view.waiting, view.now)
        if not waiting:
            return
        draft.count_pages()
        spare, admitted = draft.spare(residents), 0
        for job in waiting:
            left = job.num_left
            if not left:
                continue  # for a few iterations
            if admitted == view.free_rows or not draft.may_take(left):
                break
            is_alone = not residents and not draft.run
            room = spare if is_alone else spare - self.watermark
            pages = view.pages(job, left)
            if pages > room:
                view.use_whole_pages(job)
            if job.num_left != left:  # it reuses fewer tokens than before
                left = job.num_left
                pages = view.pages(job, left)
            if pages > room:
                break
            draft.choose(job, left, min(left, draft.budget), pages)
            spare -= pages
            admitted += 1

    def _first(self, view: PolicyView) -> Decision:
        """The first jobs by key, of residents and waiting jobs alike; of these, increments before chunks."""
        jobs = self._sorted([*view.residents, *view.waiting], view.now)
        draft, oldest = _Draft(view), next(iter(view.residents), None)
        places = {job: place for place, job in enumerate(jobs)}
        keeping = [job for job in jobs if job.is_resident and job is not oldest]
        able = ((job, left) for job in jobs if (left := job.num_left))
        for job, left in sorted(islice(able, view.max_batch), key=lambda each: each[1] > 1):
            if job in keeping:
                keeping.remove(job)
            if job not in draft.evict and draft.may_take(left):
                draft.fit(job, left, keeping, bisect_left(keeping, places[job], key=places.__getitem__))
        if not draft.run and oldest is not None and oldest.num_left:
            draft.fit(oldest, oldest.num_left, [job for job in jobs if job.is_resident and job is not oldest], 0)
        return Decision(draft.run, draft.evict)


class _Ranks(dict[RequestView, tuple[tuple[float, ...], int]]):
    """The places of jobs in a static order, by key and arrival."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self.now = 0.0

    def __missing__(self, job: RequestView) -> tuple[tuple[float, ...], int]:
        self[job] = rank = self._order.key(job, self.now), job.index
        return rank


class _Draft:
    """A decision under construction."""

    def __init__(self, view: PolicyView) -> None:
        self.view = view
        self.budget = view.token_budget
        self.free = view.free_pages
        self.taken = 0 * view.free_pages
        self.run: list[tuple[RequestView, int]] = []
        self.uncounted: Sequence[tuple[RequestView, int]] = ()  # of these, the ones whose pages are still free here
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

    def resumes(self, increments: Sequence[tuple[RequestView, int]]) -> bool:
        """Begin with these residents, if places, tokens and pages are enough for all of them."""
        view, count = self.view, len(increments)
        if count > min(view.max_batch, view.max_draws, self.budget):
            return False
        if view.most_pages(count, count) > self.free:
            needs = accumulate([view.pages(job, 1) for job, _ in increments], initial=self.taken)
            if any(each > self.free for each in needs):
                return False
        self.run, self.uncounted, self.num_draws = [*increments], increments, count
        self.budget -= count
        return True

    def count_pages(self) -> None:
        """Take the pages of the first choices, which few decisions need to know."""
        taken = sum([self.view.pages(job, size) for job, size in self.uncounted], 0 * self.free)
        self.uncounted = ()
        self.free -= taken
        self.taken += taken

    def choose(self, job: RequestView, num_left: int, num_tokens: int, pages: BlockCount) -> None:
        """Add a job with so many of its tokens, which take these pages."""
        self.run.append((job, num_tokens))
        self.num_draws += num_tokens == num_left
        self.budget -= num_tokens
        self.free -= pages
        self.taken += pages

    def resume(self, job: RequestView, num_left: int, residents: Sequence[RequestView]) -> None:
        """Choose a resident for as many tokens as budget and pages allow; evict the last ones for its pages."""
        if not self.may_take(num_left) or job in self.evict:
            return
        self.count_pages()
        size = min(num_left, self.budget)
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
        self.choose(job, num_left, size, pages)

    def fit(self, job: RequestView, num_left: int, keeping: list[RequestView], first: int) -> None:
        """Choose a job for as many tokens as budget and pages allow.

        It takes rows and pages from the end of `keeping`, down to the place `first`, unless all would not be enough.
        """
        view, size = self.view, min(num_left, self.budget)
        has_row = job.is_resident
        admitted = 0 if has_row else sum([not other.is_resident for other, _ in self.run])
        pages, is_first = view.pages(job, size), True
        while True:
            has_row = has_row or admitted < view.free_rows + len(self.evict)
            if has_row and not pages > self.free:
                self.choose(job, job.num_left, size, pages)
                return
            if is_first and pages > sum([view.releases(other) for other in keeping[first:]], self.free):
                break
            is_first = False
            if len(keeping) <= first:
                break
            self.take_from(keeping.pop())
        size = bisect_left(range(1, size), True, key=lambda n: view.pages(job, n) > self.free) if has_row else 0
        if size:  # part of a chunk
            self.choose(job, job.num_left, size, view.pages(job, size))

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
