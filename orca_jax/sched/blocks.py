"""Blocks of the KV cache: those of one pool, and numbers of them by pool."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add, gt, sub
from typing import Protocol, Self

from orca_jax.sched.prefixes.spans import Leaving, Retainer, SpanOrder
from orca_jax.values.cache_spec import LayerGroup, ceil_div
from orca_jax.values.errors import ConfigError

BlockName = tuple[int, bytes]
"""The name of a block in the prefix cache: its group, and the digest of its content and of all content before."""


class BlockPool:
    """Counts the holders of each block, and keeps those with a name.

    A block with holders gets another one only by `share`, for the same content. A block without holders is free. If
    it has a name, it is also kept: it can be shared until its memory is needed. Blocks that left a window are taken
    first, then the least recently used one, or the choice of a retention.

    Args:
        num_blocks: blocks, numbered `0..num_blocks-1`.
        forget: gets the name of each block that is taken.
    """

    def __init__(self, num_blocks: int, forget: Callable[[BlockName], None]) -> None:
        self.num_blocks = num_blocks
        self._forget = forget
        # A stack with the smallest index on top: the block used last is reused first, while it is warm.
        self._free = list(reversed(range(num_blocks)))
        # without holders, but named; oldest first
        self._kept: OrderedDict[int, None] = OrderedDict()
        # likewise, and behind the window of their last holder
        self._behind: OrderedDict[int, None] = OrderedDict()
        self._holders = [0] * num_blocks
        self._names: dict[int, BlockName] = {}
        self.spans: SpanOrder | None = None  # None: the least recently used block is taken

    def rank(self, retainer: Retainer) -> None:
        """Let a retention name the kept blocks to take. No block is kept yet."""
        self.spans = retainer.order(self._kept, self._names)

    @property
    def num_free(self) -> int:
        """The number of blocks available to `take_blocks`."""
        return len(self._free) + len(self._kept) + len(self._behind)

    def take_blocks(self, count: int) -> list[int]:
        """Take blocks for new content, each with one holder."""
        assert count <= self.num_free, f"{count} blocks are requested and {self.num_free} are free"
        while len(self._free) < count:
            if self.spans is None or self._behind:
                block, _ = (self._behind or self._kept).popitem(last=False)
            else:
                block = self.spans.give_up()
                del self._kept[block]
            self._forget(self._names.pop(block))
            self._free.append(block)
        blocks = self._free[: -count - 1 : -1] if count else []
        del self._free[len(self._free) - count :]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def give_back(
        self, blocks: Sequence[int], *, is_behind: bool = False, leaving: Leaving | None = None
    ) -> None:
        """Remove one holder from each of a row's blocks, in order; a prefix is kept longer than its continuation.

        Args:
            blocks: blocks of a row.
            is_behind: they left the window of the row.
            leaving: the request, if it leaves the row.
        """
        for block in reversed(blocks):
            assert self._holders[block] > 0, f"block {block} has no holder"
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._names:
                (self._behind if is_behind else self._kept)[block] = None
            else:
                self._free.append(block)
        if self.spans is not None and not is_behind:
            self.spans.returned(blocks, leaving)

    def share(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of these blocks, which have names."""
        for block in blocks:
            if not self._holders[block]:
                del (self._kept if block in self._kept else self._behind)[block]
            self._holders[block] += 1

    def num_kept(self, blocks: Iterable[int]) -> int:
        """The number of these blocks without a holder; `share` takes them from the free ones."""
        return sum([not self._holders[block] for block in blocks])

    def num_held_once(self, blocks: Iterable[int]) -> int:
        """The number of these blocks with a single holder."""
        return sum([self._holders[block] == 1 for block in blocks])

    def name_of(self, block: int) -> BlockName | None:
        """The name of a block, if it has one."""
        return self._names.get(block)

    def give_name(self, block: int, name: BlockName) -> None:
        """Give a name to a held block without one; it is kept when it has no holder any more."""
        assert self._holders[block] and block not in self._names, (
            f"block {block} has no holder, or has a name"
        )
        self._names[block] = name
        if self.spans is not None:
            self.spans.named(block)

    def take_name(self, block: int) -> None:
        """Remove the name of a block. A kept one becomes free; holders keep theirs."""
        del self._names[block]
        if not self._holders[block]:
            del (self._kept if block in self._kept else self._behind)[block]
            self._free.append(block)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Assert that `held`, the blocks of all rows, agrees with the counts. Raises AssertionError."""
        counts = Counter(held)
        wrong = [block for block in range(self.num_blocks) if counts[block] != self._holders[block]]
        assert not wrong, f"holders of blocks {wrong[:10]} are not those that were counted"
        kept = [*self._kept, *self._behind]
        idle = sorted([*self._free, *kept])
        assert idle == [block for block in range(self.num_blocks) if not counts[block]], (
            "free and held are not all blocks"
        )
        assert all(block in self._names for block in kept), "a block is kept and has no name"
        assert not any(block in self._names for block in self._free), (
            "a block is free and has a name"
        )
        if self.spans is not None:
            self.spans.check_integrity()


class BlockCount(Protocol):
    """Blocks, or slots, in each pool. With one pool it is an int, and as quick.

    `count > free` is true if any pool has too few. An int stands for the same number in each pool.
    """

    def __add__(self, other: Self, /) -> Self: ...

    def __radd__(self, other: int, /) -> Self: ...

    def __sub__(self, other: Self, /) -> Self: ...

    def __rmul__(self, other: int, /) -> Self: ...

    def __gt__(self, other: Self, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """A `BlockCount` of several pools."""

    by_pool: tuple[int, ...]

    def __add__(self, other: "PoolCounts | int", /) -> "PoolCounts":
        return PoolCounts(tuple(map(add, self.by_pool, self._same(other))))

    __radd__ = __add__

    def __sub__(self, other: "PoolCounts | int", /) -> "PoolCounts":
        return PoolCounts(tuple(map(sub, self.by_pool, self._same(other))))

    def __rmul__(self, factor: int, /) -> "PoolCounts":
        return PoolCounts(tuple([factor * number for number in self.by_pool]))

    def __gt__(self, other: "PoolCounts | int", /) -> bool:
        return any(map(gt, self.by_pool, self._same(other)))

    def _same(self, other: "PoolCounts | int") -> tuple[int, ...]:
        if isinstance(other, int):
            return (other,) * len(self.by_pool)
        return other.by_pool


def count_of(by_pool: Sequence[int]) -> BlockCount:
    """The value for these numbers."""
    if len(by_pool) == 1:
        return by_pool[0]
    return PoolCounts(tuple(by_pool))


def by_pool(count: BlockCount) -> tuple[int, ...]:
    """The number in each pool."""
    if isinstance(count, int):
        return (count,)
    assert isinstance(count, PoolCounts), f"{count!r} counts no blocks"
    return count.by_pool


def not_below_zero(count: BlockCount) -> BlockCount:
    """The value with 0 in place of negative numbers."""
    if isinstance(count, int):
        return max(0, count)
    return count_of([max(0, number) for number in by_pool(count)])


def most_slots(
    groups: Sequence[LayerGroup], num_blocks: Sequence[int], page_size: int, num_rows: int
) -> int:
    """The largest `n_slots` that these blocks cover; below 1 if there is none."""
    num_groups = Counter([group.pool for group in groups])
    slots = [number * page_size // num_groups[pool] for pool, number in enumerate(num_blocks)]
    return min(slots) - num_rows * (page_size - 1)


def check_covered(
    groups: Sequence[LayerGroup],
    num_blocks: Sequence[int],
    page_size: int,
    num_rows: int,
    n_slots: int,
) -> None:
    """Raise ConfigError unless blocks cover every reservation of slots."""
    covered = most_slots(groups, num_blocks, page_size, num_rows)
    waste = num_rows * (page_size - 1)
    if n_slots <= covered:
        return
    in_pool = sum(group.pool == 0 for group in groups)
    remedy = f"raise num_pages to {ceil_div(in_pool * (n_slots + waste), page_size)}"
    if covered > 0:
        remedy = f"lower n_slots to at most {covered} or {remedy}"
    raise ConfigError(
        f"{num_blocks[0]} pages of {page_size} slots are too few for n_slots={n_slots}"
        f"{f' in each of {len(groups)} groups of layers' if len(groups) > 1 else ''}: {num_rows} requests may leave "
        f"{waste} slots of their last pages unused; {remedy}",
        param="n_slots" if covered > 0 else "num_pages",
    )
