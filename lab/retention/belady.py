"""Clairvoyance: the page whose next use is farthest goes first (Belady, 1966), for the laboratory alone.

The order of requests is known: that of a run with the least recently used pages first. The next use of a page is the
next request with it in its prompt, since a page of another beginning has another digest. It is a bound for retentions
on this order, up to small changes of the order that their own speed makes.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf

from orca_jax.sched.prefixes.spans import (
    EngineRetention,
    Keeping,
    KeptSpan,
    Leaving,
    Owner,
    Retainer,
    SpanOrder,
)


class NextUses:
    """The next use of each page in an order of requests, which begin one after another.

    Args:
        pages: the digests of the full pages of each prompt, in the order in which they begin.
    """

    def __init__(self, pages: Sequence[Sequence[bytes]]) -> None:
        self._uses: defaultdict[bytes, list[int]] = defaultdict(list)  # the latest on top
        for turn in range(len(pages) - 1, -1, -1):
            for digest in pages[turn]:
                self._uses[digest].append(turn)
        self._pages = pages

        self.changed: Callable[[bytes], None] = lambda digest: None

    def begin(self, turn: int) -> None:
        """Forget the uses by a request that begins, and tell `changed` of each page."""
        for digest in self._pages[turn]:
            uses = self._uses[digest]
            if uses and uses[-1] == turn:
                uses.pop()
            else:  # it has come before its turn
                uses.remove(turn)
            self.changed(digest)

    def of(self, digest: bytes) -> float:
        """The turn of the next use; infinity for none."""
        uses = self._uses.get(digest)
        return uses[-1] if uses else inf


class _NotAsked(EngineRetention):
    """Takes the place of a retention that is not asked."""

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        """The same worth for all spans."""
        return Keeping()

    def used(self, span: KeptSpan, now: float) -> None:
        """Does nothing: uses are known."""

    def lost(self, span: KeptSpan, now: float) -> None:
        """Does nothing: uses are known."""


class Clairvoyant(Retainer):
    """Gives up the page whose next use is farthest, and of equal ones the last page of a prompt.

    Args:
        uses: the next uses of pages.
        page_size: tokens of a page.
        clock: seconds.
    """

    def __init__(self, uses: NextUses, page_size: int, clock: Callable[[], float]) -> None:
        super().__init__(_NotAsked(), page_size, clock)
        self.uses = uses

    def order(
        self, kept: Mapping[int, None], names: Mapping[int, tuple[int, bytes]]
    ) -> "FarthestFirst":
        """The order by the next uses."""
        return FarthestFirst(self, kept, names)


class FarthestFirst(SpanOrder):
    """The order of a pool: a heap of the kept blocks by the next uses of their pages."""

    def __init__(
        self,
        retainer: Clairvoyant,
        kept: Mapping[int, None],
        names: Mapping[int, tuple[int, bytes]],
    ) -> None:
        super().__init__(retainer, kept, names)
        self._uses = retainer.uses
        self._uses.changed = self._changed
        self._farthest: list[tuple[float, int, int]] = []  # minus the next use, place, block
        self._places: dict[int, int] = {}  # the latest place of each block
        self._blocks: dict[bytes, int] = {}
        self._number = 0

    def named(self, block: int) -> None:
        """Note the content of a block."""
        self._blocks[self._names[block][1]] = block

    def returned(self, blocks: Sequence[int], leaving: Leaving | None) -> None:
        """Give a place to the blocks that are kept now; of equal ones the end of a prompt goes first."""
        for block in reversed(blocks):
            if block in self._kept:
                self._put(block)

    def used(self, blocks: Sequence[int], owner: Owner) -> None:
        """Does nothing: uses are known."""

    def give_up(self) -> int:
        """The kept block whose next use is farthest; of equal ones the one that was left first."""
        while True:
            _, place, block = heappop(self._farthest)
            if self._places.get(block) == place and block in self._kept:
                return block

    def check_integrity(self) -> None:
        """Assert that each kept block has a place. Raises AssertionError."""
        assert all(block in self._places for block in self._kept), "a kept block has no place"

    def _put(self, block: int) -> None:
        self._number += 1
        self._places[block] = self._number
        farthest = -self._uses.of(self._names[block][1])
        heappush(self._farthest, (farthest, self._number, block))

    def _changed(self, digest: bytes) -> None:
        """Give another place to the block of a page that was not found by a request."""
        block = self._blocks.get(digest)
        if block is not None and block in self._kept and self._names[block][1] == digest:
            self._put(block)
