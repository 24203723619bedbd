"""Selections of running and waiting requests in one order: urgent ones take rows and blocks from those behind."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice

from orca_jax.sched.blocks import BlockCount
from orca_jax.sched.chunked import ChunkedScheduler, SelectionDraft, live
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orderings.base import KeyQueue
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.prefixes.cache import NO_HIT, Hit
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Selection


class PreemptingScheduler(ChunkedScheduler):
    """Chooses running and waiting requests together. Its ordering is one of keys, and answers for progress."""

    def select(self, pool: RequestPool, kv: KVManager) -> Selection:
        """The first requests of all; of these, increments before chunks."""
        assert isinstance(self.queue, KeyQueue), "an ordering without keys"
        draft = self.draft(pool, kv)
        running = live(pool.running.values())
        lefts = dict.fromkeys(running, 0)
        for request in self.able(running, pool):
            lefts[request] = request.num_left
        joint = JointSelection(draft, pool, lefts, self.free_rows(pool, kv))
        joint.choose(live(self.queue.together(pool)))
        return Selection(draft.choices, draft.preempted)


class JointSelection:
    """The first requests of an order, of running and waiting ones alike; of these, increments before chunks.

    Those behind are paused, and the last ones lose rows and blocks that others lack. The request admitted longest ago
    keeps its own.

    Args:
        draft: the selection under construction.
        pool: the requests.
        lefts: tokens that each running request may process, 0 for none; the first one was admitted longest ago.
        num_rows: free rows for newcomers.
    """

    def __init__(
        self, draft: SelectionDraft, pool: RequestPool, lefts: Mapping[Request, int], num_rows: int
    ) -> None:
        self._draft = draft
        self._kv = draft.kv
        self._free = draft.free  # before any choice
        self._reuse = pool.reuse
        self._has_slot = pool.newcomers()
        self._lefts = lefts
        self._num_rows = num_rows
        self._hits: dict[Request, Hit] = {}

    def choose(self, requests: Sequence[Request]) -> None:
        """Choose among running requests that have not ended and waiting ones, the most urgent first."""
        draft = self._draft
        oldest = next(iter(self._lefts), None)
        places = {request: place for place, request in enumerate(requests)}
        with_rows = [each for each in requests if each.row is not None and each is not oldest]
        keeping = with_rows.copy()
        able = ((request, left) for request in requests if (left := self._left(request)))
        first = sorted(islice(able, draft.max_bs), key=lambda each: each[1] > 1)
        for request, left in first:
            if request in keeping:
                keeping.remove(request)
            if request not in draft.preempted and draft.may_take(left):
                behind = bisect_left(keeping, places[request], key=places.__getitem__)
                self._fit(request, left, keeping, behind)
        if not draft.choices and oldest is not None and self._lefts[oldest]:
            self._fit(oldest, self._lefts[oldest], with_rows, 0)

    def _left(self, request: Request) -> int:
        """Tokens of a request that may be processed in this selection."""
        if request.row is not None:
            return self._lefts[request]
        if self._reuse is not None and self._reuse.awaits_prompt(request, ()):
            return 0  # for a few iterations
        return request.num_tokens - self._hit(request).num_tokens

    def _hit(self, request: Request) -> Hit:
        """The beginning of a waiting request in the prefix cache."""
        if self._reuse is None:
            return NO_HIT
        if request not in self._hits:
            self._hits[request] = self._reuse.find(request)
        return self._hits[request]

    def _fit(self, request: Request, num_left: int, keeping: list[Request], first: int) -> None:
        """Choose a request for as many tokens as budget and blocks allow.

        It takes rows and blocks from the end of `keeping`, down to the place `first`, unless all would not be enough.
        """
        draft = self._draft
        size = min(num_left, draft.budget)
        blocks = self._blocks(request, size)
        if self._has_row(request) and not blocks > draft.free:
            self._take(request, size)
            return
        spare = [self._kv.releasable(other.row) for other in keeping[first:]]
        if not blocks > sum(spare, draft.free):
            while len(keeping) > first:
                self._preempt(keeping.pop())
                if self._has_row(request) and not blocks > draft.free:
                    self._take(request, size)
                    return
        if not self._has_row(request):
            return
        part = bisect_left(
            range(1, size), True, key=lambda n: self._blocks(request, n) > draft.free
        )
        if part:  # of a chunk
            self._take(request, part)

    def _has_row(self, request: Request) -> bool:
        """True if a request has a row, or can get one."""
        if request.row is not None:
            return True
        newcomers = sum([choice.request.row is None for choice in self._draft.choices])
        return newcomers < self._num_rows + len(self._draft.preempted)

    def _blocks(self, request: Request, num_tokens: int) -> BlockCount:
        """Blocks that a request takes, beside its own, until `num_tokens` tokens more are computed."""
        kv = self._kv
        row = request.row
        if row is not None:
            start = request.num_computed
            lacking = kv.lacking(row, start + num_tokens)
            if kv.has_windows:
                return lacking - kv.behind(row, start)
            return lacking
        hit = self._hit(request)
        needed = kv.needed(hit, hit.num_tokens + num_tokens)
        if hit.sources and needed > self._free:  # the source of the copy would be one too many
            hit = hit.without_copy(kv.page_size)
            self._hits[request] = hit
            needed = kv.needed(hit, hit.num_tokens + num_tokens)
        return needed

    def _take(self, request: Request, num_tokens: int) -> None:
        """Choose a request with so many tokens, unless there is no slot for its adapter."""
        hit = NO_HIT
        start = request.num_computed
        if request.row is None:
            if not self._has_slot(request):
                return
            hit = self._hit(request)
            start = hit.num_tokens
        size = self._draft.chunk(request, num_tokens, start)
        blocks = self._blocks(request, size)
        self._draft.choose(request, self._left(request), size, blocks, hit)

    def _preempt(self, victim: Request) -> None:
        """Take row and blocks from a request, and drop it from the selection."""
        draft = self._draft
        for place, choice in enumerate(draft.choices):
            if choice.request is victim:
                size = choice.num_tokens
                blocks = self._blocks(victim, size)
                del draft.choices[place]
                draft.num_draws -= size == self._left(victim)
                draft.budget += size
                draft.free += blocks
                draft.taken -= blocks
                break
        draft.preempted.append(victim)
        draft.free += self._kv.releasable(victim.row)
