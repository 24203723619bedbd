"""Kept pages in spans, and the order in which a retention gives them up.

A request that leaves its row leaves pages in the prefix cache. Those in a row that are equal in their use are a span.
A retention gives each span a worth. When a pool needs blocks, it takes the last page of the span with the least worth.
A page at the begin of another request goes into that request's span when it is left again.

The work is bounded: a span is ranked when it is left and when its worth has run out, at most `MOST_ASKED` of these for
each block that is taken, and places in the order are found by heaps. Whatever a retention answers, a block is found.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import inf, isfinite
from typing import NamedTuple, Protocol

from orca_jax.values.cache_hints import USUAL_PRIORITY, CacheHints, CacheWish
from orca_jax.values.errors import EngineError

MOST_SPANS = 32  # that a request leaves in a group; the last one has all pages that follow
MOST_ASKED = 8  # spans whose worth has run out, for each block
_SPARE = 64  # places of spans that have gone, before they are removed

logger = logging.getLogger(__name__)


class KeptSpan(NamedTuple):
    """Neighbouring pages of one prompt without a request. Times are seconds of the engine's clock.

    Attributes:
        start: tokens before it in its prompt; 0 if it is not known.
        num_tokens: tokens of its pages.
        group: the group of layers, see `values/cache_spec.py`.
        kept_at: the time of its last use.
        hits: requests that began with these pages since they were computed.
        is_shared: requests of several sessions began with them.
        tenant: the tenant of the latest request; "" without one.
        session: its session, else its program; "" without one.
        ttl: seconds for which it should be kept, as the caller wishes; None without a wish.
        priority: wish of the caller, from 0 to 100: 0 for pages of no further use, 50 without a wish. It is at least 50
            if the span is shared.
        has_ended: the session has ended, as the caller said, and no other one has begun with the span.
    """

    start: int
    num_tokens: int
    group: int
    kept_at: float
    hits: int = 0
    is_shared: bool = False
    tenant: str = ""
    session: str = ""
    ttl: float | None = None
    priority: int = USUAL_PRIORITY
    has_ended: bool = False


class Keeping(NamedTuple):
    """The rank of a span.

    Attributes:
        worth: of all spans the one with the least worth is given up first, and of equal ones the least recently used.
        seconds: the worth holds for so long; then the retention is asked again.
    """

    worth: float = 0.0
    seconds: float = inf


class EngineRetention(Protocol):
    """Ranks the spans of the prefix cache."""

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        """The rank of a span from now on."""
        ...

    def used(self, span: KeptSpan, now: float) -> None:
        """Take note of a request with pages of a kept span at its begin. The span is as before."""
        ...

    def lost(self, span: KeptSpan, now: float) -> None:
        """Take note of the eviction of a span's first page."""
        ...


class Owner(NamedTuple):
    """The request that leaves or uses pages, as far as a retention may know it."""

    tenant: str = ""
    session: str = ""
    ends: bool = False
    wishes: Sequence[CacheWish] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The session; those of other tenants may have the same name."""
        return self.tenant, self.session


NOBODY = Owner()


def owner_of(tenant: str, program: str, hints: CacheHints | None) -> Owner:
    """The owner of the pages of a request."""
    if hints is None:
        return Owner(tenant, program)
    return Owner(tenant, hints.session or program, hints.ends, hints.wishes)


class Leaving(NamedTuple):
    """Blocks of a row that a request leaves: who it is, their group, and the page of the first one."""

    owner: Owner
    group: int
    first: int


class _ListedSpan:
    """A span in the table. Some of its blocks may be of another one by now."""

    __slots__ = ("blocks", "has_ended", "is_losing", "num_own", "number", "order", "owner", "span")

    def __init__(self, blocks: list[int], span: KeptSpan, owner: Owner, order: int) -> None:
        self.order = order  # that of leaving
        self.blocks = blocks  # in the order of their tokens
        self.span = span  # as it was left
        self.owner = owner
        self.num_own = len(blocks)  # also those that requests hold, until they leave them
        self.number = 0  # of its place in the order; 0: it has none
        self.has_ended = False
        self.is_losing = False  # a page was given up


class Retainer:
    """A retention for all pools of an engine. After its first fault the least recently used spans go first.

    Args:
        retention: ranks spans. It may raise `EngineError`.
        page_size: tokens of a page.
        clock: seconds.

    Attributes:
        fault: the reason for which it is not asked any more; "" while it is.
    """

    def __init__(
        self, retention: EngineRetention, page_size: int, clock: Callable[[], float]
    ) -> None:
        self.retention = retention
        self.page_size = page_size
        self.clock = clock
        self.fault = ""

    def order(
        self, kept: Mapping[int, None], names: Mapping[int, tuple[int, bytes]]
    ) -> "SpanOrder":
        """The order of the kept blocks of a pool. A simulation that knows the future replaces it.

        Args:
            kept: the kept blocks, the least recently used one first.
            names: the group and the digest of each block with a name.
        """
        return SpanOrder(self, kept, names)

    def ask(self, span: KeptSpan) -> Keeping:
        """The rank of a span."""
        if not self.fault:
            try:
                return self.retention.keep(span, self.clock())
            except EngineError as error:
                self._fail(error)
        return Keeping()

    def tell(self, what: Callable[[KeptSpan, float], None], span: KeptSpan) -> None:
        """Call `used` or `lost` of the retention."""
        if not self.fault:
            try:
                what(span, self.clock())
            except EngineError as error:
                self._fail(error)

    def _fail(self, error: EngineError) -> None:
        self.fault = str(error)
        logger.error("%s; from now on the least recently used pages are given up first", self.fault)


class SpanOrder:
    """The kept blocks of one pool as spans, in the order of their worth.

    Args:
        retainer: ranks them.
        kept: the kept blocks of the pool, the least recently used one first.
        names: the group and the digest of each block with a name.
    """

    def __init__(
        self,
        retainer: Retainer,
        kept: Mapping[int, None],
        names: Mapping[int, tuple[int, bytes]],
    ) -> None:
        self._retainer = retainer
        self._kept = kept
        self._names = names
        self._span_of: dict[int, _ListedSpan] = {}  # the latest one of each block
        self._hits: dict[int, int] = {}
        # the session of each block with hits; None: several
        self._sessions: dict[int, tuple[str, str] | None] = {}
        self._by_worth: list[tuple[float, int, int, _ListedSpan]] = []
        self._by_time: list[tuple[float, int, _ListedSpan]] = []  # at which worths run out
        self._of_session: defaultdict[tuple[str, str], set[_ListedSpan]] = defaultdict(set)
        self._count = 0  # of places that were given

    def named(self, block: int) -> None:
        """Forget what is known of a block: it gets new content."""
        self._part(block)
        self._hits.pop(block, None)
        self._sessions.pop(block, None)

    def returned(self, blocks: Sequence[int], leaving: Leaving | None) -> None:
        """Make spans of the blocks that are kept now; some have another holder, or no name."""
        if self._retainer.fault:
            return
        if leaving is None:
            kept = [block for block in blocks if block in self._kept]
            if kept:
                self._add(kept, *self._former(kept))
            return
        wishes = _by_page(leaving, len(blocks), self._retainer.page_size)
        runs: list[list[int]] = []  # of places in `blocks`
        before: object = None
        for place, block in enumerate(blocks):
            if block not in self._kept:
                before = None
                continue
            kind = self._hits.get(block, 0), self._is_shared(block), wishes[place]
            if kind == before or len(runs) >= MOST_SPANS:
                runs[-1].append(place)
            else:
                runs.append([place])
            before = kind
        # the last one is the first to go among equals
        for run in reversed(runs):
            self._leave([blocks[place] for place in run], run[0], wishes[run[0]], leaving)
        if leaving.owner.ends:
            self._end(leaving.owner.key)

    def used(self, blocks: Sequence[int], owner: Owner) -> None:
        """Count the use of blocks by a new request, and tell the retention."""
        if self._retainer.fault:
            return
        found: dict[_ListedSpan, None] = {}
        for block in blocks:
            held = self._span_of.get(block)
            if held is not None and len(found) < MOST_SPANS:
                found[held] = None
            known = self._sessions.setdefault(block, held.owner.key if held else owner.key)
            if known != owner.key:
                self._sessions[block] = None
            self._hits[block] = self._hits.get(block, 0) + 1
        for held in found:
            self._retainer.tell(self._retainer.retention.used, self._now(held))

    def give_up(self) -> int:
        """The kept block to take. There is one."""
        if not self._retainer.fault:
            self._renew()
        while self._by_worth and not self._retainer.fault:
            _, _, number, held = self._by_worth[0]
            block = self._last_of(held) if held.number == number else None
            if block is None:
                heappop(self._by_worth)
                if held.number == number:
                    self._drop(held)
                continue
            if not held.is_losing:
                held.is_losing = True
                self._retainer.tell(self._retainer.retention.lost, self._now(held))
            held.blocks.pop()
            self._part(block)
            return block
        return next(iter(self._kept))

    def check_integrity(self) -> None:
        """Assert that each kept block is in a span with a place. Raises AssertionError."""
        if self._retainer.fault:
            return
        placed = {held for _, _, number, held in self._by_worth if held.number == number}
        for block in self._kept:
            held = self._span_of.get(block)
            assert held is not None and held in placed and block in held.blocks, (
                f"kept block {block} is in no span"
            )
        listed = set[_ListedSpan]().union(*self._of_session.values())
        assert listed <= placed, "a span of a session has no place"

    def _last_of(self, held: _ListedSpan) -> int | None:
        """The last block that is still of a span; those after it are removed from it."""
        while held.blocks:
            block = held.blocks[-1]
            if block in self._kept and self._span_of.get(block) is held:
                return block
            held.blocks.pop()
        return None

    def _leave(
        self, blocks: list[int], place: int, wish: CacheWish | None, leaving: Leaving
    ) -> None:
        owner = leaving.owner
        is_shared = self._is_shared(blocks[0])
        priority = USUAL_PRIORITY if wish is None else wish.priority
        if is_shared:  # one session says nothing about the others
            priority = max(priority, USUAL_PRIORITY)
        span = KeptSpan(
            (leaving.first + place) * self._retainer.page_size,
            len(blocks) * self._retainer.page_size,
            leaving.group,
            self._retainer.clock(),
            self._hits.get(blocks[0], 0),
            is_shared,
            owner.tenant,
            owner.session,
            None if wish is None else wish.ttl,
            priority,
        )
        self._add(blocks, span, owner)

    def _former(self, blocks: Sequence[int]) -> tuple[KeptSpan, Owner]:
        """The span of blocks that no request leaves: a copied page, or pages that were read from outside."""
        size = len(blocks) * self._retainer.page_size
        now = self._retainer.clock()
        held = self._span_of.get(blocks[0])
        if held is None:
            return KeptSpan(0, size, self._names[blocks[0]][0], now), NOBODY
        return held.span._replace(num_tokens=size, kept_at=now), held.owner

    def _add(self, blocks: list[int], span: KeptSpan, owner: Owner) -> None:
        held = _ListedSpan(blocks, span, owner, self._count)
        for block in blocks:
            self._part(block)
            self._span_of[block] = held
        if owner.session:
            self._of_session[owner.key].add(held)
        self._place(held)

    def _place(self, held: _ListedSpan) -> None:
        """Rank a span, and give it its place."""
        keep = self._retainer.ask(self._now(held))
        self._count += 1
        held.number = self._count
        heappush(self._by_worth, (keep.worth, held.order, held.number, held))
        if isfinite(keep.seconds):
            heappush(self._by_time, (self._retainer.clock() + keep.seconds, held.number, held))
        most = 2 * len(self._span_of) + _SPARE
        if len(self._by_worth) > most:
            self._by_worth = [each for each in self._by_worth if each[2] == each[3].number]
            heapify(self._by_worth)
        if len(self._by_time) > most:
            self._by_time = [each for each in self._by_time if each[1] == each[2].number]
            heapify(self._by_time)

    def _renew(self) -> None:
        """Rank spans with outdated worths again."""
        now = self._retainer.clock()
        for _ in range(MOST_ASKED):
            if not self._by_time or self._by_time[0][0] > now:
                return
            _, number, held = heappop(self._by_time)
            if held.number == number and self._last_of(held) is not None:
                self._place(held)

    def _end(self, key: tuple[str, str]) -> None:
        """Let the spans that a session has alone be ranked again."""
        if not key[1]:
            return
        now = self._retainer.clock()
        for held in self._of_session[key]:
            if held.span.is_shared:
                continue
            held.has_ended = True
            heappush(self._by_time, (now, held.number, held))

    def _part(self, block: int) -> None:
        """Part a block from its span, which ends with its last one."""
        held = self._span_of.pop(block, None)
        if held is not None:
            held.num_own -= 1
            if not held.num_own:
                self._drop(held)

    def _is_shared(self, block: int) -> bool:
        return block in self._sessions and self._sessions[block] is None

    def _drop(self, held: _ListedSpan) -> None:
        """Take a span out of the order: no block of it is kept."""
        held.number = 0
        key = held.owner.key
        if key in self._of_session:
            self._of_session[key].discard(held)
            if not self._of_session[key]:
                del self._of_session[key]

    def _now(self, held: _ListedSpan) -> KeptSpan:
        size = len(held.blocks) * self._retainer.page_size
        return held.span._replace(num_tokens=size, has_ended=held.has_ended)


def _by_page(leaving: Leaving, number: int, page_size: int) -> Sequence[CacheWish | None]:
    """The wish for each of some pages, by its first token."""
    found: list[CacheWish | None] = [None] * number
    for wish in leaving.owner.wishes:
        begin = min(number, max(0, wish.start // page_size - leaving.first))
        end = number
        if wish.end is not None:
            end = min(number, max(begin, -(-wish.end // page_size) - leaving.first))
        found[begin:end] = [wish] * (end - begin)
    return found
