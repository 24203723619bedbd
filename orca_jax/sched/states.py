"""Blocks of recurrent states: the live one of each row, and snapshots in the prefix cache.

A layer that is recurrent keeps one state of a row: that after all of its tokens, and of no other position. So a row has
one state block (`cache_spec`), and most plans read and write it in place. A snapshot is a block left alone, without
a copy: a plan reads it and writes another one, and the old block gets a name in the prefix cache.

Snapshots are sparse, since each costs as much as hundreds of tokens in pages. They are taken at *borders*: every
`SNAPSHOT_TOKENS` or so, and before the last token of a prompt. A plan ends at a border that lies inside it. The states
of ended and preempted requests are kept too.
"""

import sys
from collections.abc import Iterator
from typing import NamedTuple

from orca_jax.sched.blocks import BlockName, BlockPool
from orca_jax.values.cache_spec import NO_BLOCK
from orca_jax.values.errors import ConfigError
from orca_jax.values.step import StateMove

SNAPSHOT_TOKENS = 1024  # distance of snapshots within a text, rounded down to whole pages
WORTH_A_SNAPSHOT = 16  # tokens that one must save


class Snapshot(NamedTuple):
    """The content of a kept state: all tokens before a position.

    Attributes:
        digest: the digest of these tokens.
        parent: the digest of the full pages, or of salt and adapter before the first one.
        ids: the ids of the tokens after them, 4 bytes each; none at the end of a page.
        roots: digests of the first pages that it was computed from, as those of a `Page` (`prefixes/cache.py`).
    """

    digest: bytes
    parent: bytes
    ids: bytes
    roots: frozenset[bytes]


class States:
    """The only owner of state blocks.

    In a plan a row has at most two blocks, one to read and one to write. So `2 * num_rows` blocks always suffice, and a
    snapshot keeps no row waiting: those without a holder are free, the least recently used one first. With fewer blocks
    there are no snapshots, and one block for each row suffices.

    Args:
        num_states: blocks, numbered from 0.
        num_rows: the largest number of running requests.
        page_size: tokens of a page.

    Attributes:
        worth: tokens that a snapshot must save.

    Raises:
        ConfigError: a row might get no block.
    """

    def __init__(self, num_states: int, num_rows: int, page_size: int) -> None:
        if num_states < num_rows:
            message = f"num_states={num_states} is less than one block of states for each of {num_rows} rows; raise it"
            raise ConfigError(message, param="num_states")
        self.num_states = num_states
        self.has_snapshots = num_states >= 2 * num_rows
        self.worth = WORTH_A_SNAPSHOT if self.has_snapshots else sys.maxsize
        self._interval = max(1, SNAPSHOT_TOKENS // page_size) * page_size
        self._pool = BlockPool(num_states, self._taken)
        self._live = [NO_BLOCK] * num_rows
        self._begins = [0] * num_rows  # tokens of the hit that a row began with
        self._snapshots: dict[bytes, tuple[Snapshot, int]] = {}  # with its block, by digest
        self._following: dict[bytes, dict[bytes, bytes]] = {}  # parent -> ids -> digest

    def by_use(self) -> tuple[int, int, int]:
        """The numbers of blocks that rows hold, of snapshots, and of the others."""
        num_free = self._pool.num_free
        num_snapshots = len(self._snapshots)
        return self.num_states - num_free, num_snapshots, num_free - num_snapshots

    def border_after(self, begin: int, start: int, num_prompt: int) -> int:
        """The first border after position `start`.

        The one before the last token of a prompt is left out if the border before it, or the begin, is close.

        Args:
            begin: tokens of the hit that the row began with.
            start: a position.
            num_prompt: tokens of the prompt.
        """
        following = start - start % self._interval + self._interval
        last = num_prompt - 1
        if (
            start < last < following
            and last - max(begin, last - last % self._interval) >= self.worth
        ):
            return last
        return following

    def chunk(self, row: int | None, start: int, num_tokens: int, num_prompt: int) -> int:
        """The tokens of a plan from position `start` on, up to a border inside them.

        Args:
            row: the row of a running request; None: it begins at `start`.
            start: a position.
            num_tokens: the tokens that the plan would have without borders.
            num_prompt: tokens of the prompt.
        """
        if num_tokens == 1 or not self.has_snapshots:
            return num_tokens
        begin = start if row is None else self._begins[row]
        return min(num_tokens, self.border_after(begin, start, num_prompt) - start)

    def is_border(self, row: int, start: int, num_prompt: int) -> bool:
        """True if a plan of a row that starts here leaves a snapshot."""
        if not self.has_snapshots or (start % self._interval and start != num_prompt - 1):
            return False  # nearly always
        begin = self._begins[row]
        return start > begin and self.border_after(begin, start - 1, num_prompt) == start

    def begin(self, row: int, num_tokens: int, block: int) -> None:
        """Let a new row begin with a snapshot, before any block is taken for the same plan."""
        assert self._live[row] == NO_BLOCK, f"row {row} has a state"
        self._pool.share((block,))
        self._live[row] = block
        self._begins[row] = num_tokens

    def move(self, row: int) -> StateMove:
        """The blocks that the next plan of a row reads and writes. It reads a snapshot, and writes another block."""
        source = self._live[row]
        if source != NO_BLOCK and self._pool.name_of(source) is None:
            return StateMove(source, source)
        (self._live[row],) = self._pool.take_blocks(1)
        if source != NO_BLOCK:
            # No other member of the plan takes it: of the free blocks it is the last one to be taken, and there are
            # `num_rows` others.
            self._pool.give_back((source,))
        return StateMove(source, self._live[row])

    def free(self, row: int) -> None:
        """Free the block of a row; one with a name can still be found."""
        if self._live[row] != NO_BLOCK:
            self._pool.give_back((self._live[row],))
        self._live[row] = NO_BLOCK
        self._begins[row] = 0

    def name(self, row: int, snapshot: Snapshot) -> None:
        """Make the state of a row a snapshot; the first block with a content counts."""
        block = self._live[row]
        if (
            not self.has_snapshots
            or snapshot.digest in self._snapshots
            or self._pool.name_of(block) is not None
        ):
            return
        self._keep(block, snapshot)

    def block_at(self, digest: bytes) -> int:
        """The block of the snapshot at the end of a full page; `NO_BLOCK` if there is none."""
        found = self._snapshots.get(digest)
        if found is None or found[0].ids:
            return NO_BLOCK
        return found[1]

    def restore(self, snapshot: Snapshot) -> int:
        """Take a block for a snapshot, whose content follows; `NO_BLOCK` if none is free."""
        if not self.has_snapshots or not self._pool.num_free:
            return NO_BLOCK
        (block,) = self._pool.take_blocks(1)
        self._keep(block, snapshot)
        self._pool.give_back((block,))
        return block

    def _keep(self, block: int, snapshot: Snapshot) -> None:
        self._pool.give_name(block, (0, snapshot.digest))
        self._snapshots[snapshot.digest] = snapshot, block
        self._following.setdefault(snapshot.parent, {})[snapshot.ids] = snapshot.digest

    def follows(self, parent: bytes) -> bool:
        """True if there is a snapshot within the page after a digest, or at its begin."""
        return parent in self._following

    def find(self, parent: bytes, wanted: bytes, id_bytes: int) -> Iterator[tuple[bytes, int]]:
        """The snapshots after a digest that lie on a text, the longest first: the ids of each after it, and its block.

        Args:
            parent: the digest before a page.
            wanted: the ids of the page, as many as may be found.
            id_bytes: bytes of an id.
        """
        following = self._following.get(parent, {})
        for size in range(len(wanted), -1, -id_bytes):
            digest = following.get(wanted[:size])
            if digest is not None:
                yield wanted[:size], self._snapshots[digest][1]

    def roots_of(self, block: int) -> frozenset[bytes]:
        """The roots of a snapshot."""
        name = self._pool.name_of(block)
        if name is None:
            return frozenset()
        return self._snapshots[name[1]][0].roots

    def forget(self, roots: frozenset[bytes] | None) -> None:
        """Erase the snapshots with one of these roots, or all. Holders keep their blocks, unfindable."""
        for snapshot, block in list(self._snapshots.values()):
            if roots is None or snapshot.roots & roots:
                self._pool.take_name(block)
                self._taken((0, snapshot.digest))

    def check_integrity(self) -> None:
        """Assert that no block is lost, or counted twice, and that names and snapshots agree. Raises AssertionError."""
        live = [block for block in self._live if block != NO_BLOCK]
        assert len(set(live)) == len(live), f"a state has two rows: {live}"
        self._pool.check_integrity(live)
        for digest, (snapshot, block) in self._snapshots.items():
            assert self._pool.name_of(block) == (0, digest), f"state {block} has another name"
            assert block not in live, (
                f"snapshot {block} is the state of a row, which would overwrite it"
            )
            assert self._following[snapshot.parent][snapshot.ids] == digest, (
                "the index of snapshots differs"
            )
        listed = sum([len(each) for each in self._following.values()])
        assert listed == len(self._snapshots), (
            f"{listed} of {len(self._snapshots)} snapshots are in the index"
        )

    def _taken(self, name: BlockName) -> None:
        """Erase the snapshot whose block the pool takes."""
        snapshot, _ = self._snapshots.pop(name[1])
        following = self._following[snapshot.parent]
        del following[snapshot.ids]
        if not following:
            del self._following[snapshot.parent]
