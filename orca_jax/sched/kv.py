"""Ownership of rows, reserved slots and blocks."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from orca_jax.sched.blocks import BlockCount, BlockPool, by_pool, check_covered, count_of
from orca_jax.sched.prefixes.cache import NO_HIT, Hit, Page, PrefixCache
from orca_jax.sched.prefixes.spans import NOBODY, Leaving, Owner, Retainer
from orca_jax.sched.states import States
from orca_jax.values.cache_spec import NO_BLOCK, ONE_GROUP, LayerGroup, ceil_div, sums_by_pool
from orca_jax.values.errors import ConfigError

_NO_BLOCKS: tuple[Sequence[int], ...] = ()


class KVManager:
    """The only owner of rows, slots and blocks. A request holds slots and blocks through its row.

    Verbs come in pairs: `acquire_row`/`release_row`, `reserve`/`release` for slots, `allocate`/`free` for blocks.

    A row has a list of blocks in each group of layers, and entry i of each list has the tokens of page i. Blocks are
    allocated as tokens are written. In a group with a window, `leave` gives back blocks without later readers; their
    entries stay and hold `NO_BLOCK`. Blocks of groups with the same pool are interchangeable. `BlockCount` counts them.

    With `n_slots`, a row reserves slots: the paper's `n_rsrv`. A slot is the place of one token in one group, so there
    are `n_slots` for each group. A row reserves once: the most that its request can hold in each group. So no running
    request can starve another (section 4.2). A row wastes less than one page of each group. So the blocks of a
    pool with g groups cover every reservation if
    `num_blocks * page_size >= g * (n_slots + num_rows * (page_size - 1))`, and `allocate` within one cannot fail.

    Without `n_slots` nothing is reserved: blocks are allocated on demand. The scheduler counts free blocks before it
    chooses requests, and preempts the least urgent ones if too few are free.

    Args:
        num_blocks: blocks of each pool, numbered from 0.
        page_size: tokens of a page.
        num_rows: the largest number of running requests, over all iterations in flight.
        n_slots: the largest number of reserved slots of a group; None for blocks on demand.
        groups: the groups of layers.
        longest: most tokens of a request in one plan, without `n_slots`; None: no bound.
        num_drafts: most proposed tokens of a request in one plan, with `n_slots`.
        num_states: blocks of recurrent states; 0: the model has none.

    Raises:
        ConfigError: a size is below one, or the blocks cannot cover `n_slots`.
    """

    def __init__(
        self,
        num_blocks: Sequence[int],
        page_size: int,
        num_rows: int,
        n_slots: int | None = None,
        *,
        groups: Sequence[LayerGroup] = ONE_GROUP,
        longest: int | None = None,
        num_drafts: int = 0,
        num_states: int = 0,
    ) -> None:
        sizes = {"num_pages": min(num_blocks), "page_size": page_size, "num_rows": num_rows}
        if n_slots is not None:
            sizes["n_slots"] = n_slots
        for name, value in sizes.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}", param=name)
        of_pools = Counter([group.pool for group in groups])
        num_groups = [of_pools[pool] for pool in range(len(num_blocks))]
        if n_slots is not None:
            check_covered(groups, num_blocks, page_size, num_rows, n_slots)
        self.num_blocks = tuple(num_blocks)
        self.page_size = page_size
        self.num_rows = num_rows
        self.n_slots = n_slots
        self.groups = tuple(groups)
        self._longest = longest
        self._num_drafts = num_drafts
        self._windows = [
            (index, group) for index, group in enumerate(groups) if group.window is not None
        ]
        self.has_windows = bool(self._windows)
        self.of_page = count_of(num_groups)  # blocks of one page of a row, in all groups
        self.no_blocks = count_of([0] * len(num_blocks))
        self.reserved_slots = self.no_blocks  # [n_rsrv]
        self._free_rows = list(reversed(range(num_rows)))
        self._pools = [
            BlockPool(number, lambda name: self.prefixes.taken(name)) for number in num_blocks
        ]
        self._pool_of = [self._pools[group.pool] for group in groups]
        self.states = States(num_states, num_rows, page_size) if num_states else None
        self.prefixes = PrefixCache(self._pool_of, groups, page_size, self.states)
        self.retainer: Retainer | None = None
        self._held = [False] * num_rows
        self._slots_of_row: list[tuple[int, ...]] = [()] * num_rows  # by group
        self._num_pages = [0] * num_rows  # entries of a row's list in each group
        self._blocks_of_row: list[tuple[list[int], ...]] = [
            self._no_lists() for _ in range(num_rows)
        ]
        self._first = [[0] * len(groups) for _ in range(num_rows)]  # entries before these were left
        self._leaves_at = [self._next_leave([0] * len(groups))] * num_rows  # by the start of a plan
        # What the demand of all running requests may reach: slots with reservations, else blocks.
        self.capacity = count_of(num_blocks) if n_slots is None else n_slots * self.of_page

    @property
    def num_free_blocks(self) -> BlockCount:
        """Blocks without a holder, blocks in the prefix cache included."""
        pools = self._pools
        if len(pools) == 1:
            return pools[0].num_free
        return count_of([pool.num_free for pool in pools])

    @property
    def has_reservations(self) -> bool:
        """True if a request reserves all its slots at admission; False for blocks on demand."""
        return self.n_slots is not None

    @property
    def longest_request(self) -> int:
        """The largest number of tokens of one request, if all or nearly all of them are its prompt."""
        if self.n_slots is not None:
            return self.n_slots
        tokens = range(1, max(self.num_blocks) * self.page_size + 1)
        return bisect_right(tokens, False, key=lambda total: self._blocks(total) > self.capacity)

    @property
    def num_held_rows(self) -> int:
        """The number of rows in use."""
        return self.num_rows - len(self._free_rows)

    @property
    def num_free_rows(self) -> int:
        """The number of rows free for new requests."""
        return len(self._free_rows)

    def demand(self, num_prompt: int, max_total: int) -> BlockCount:
        """The most that a request holds at once: slots with reservations, else blocks. It is compared with `capacity`.

        Args:
            num_prompt: tokens of its prompt, in one plan with reservations.
            max_total: tokens of prompt and output.
        """
        if self.n_slots is None:
            return self._blocks(max_total)
        if self._windows:
            return self._sum(self._slots(num_prompt, max_total))
        return max_total * self.of_page

    def blocks_by_group(self, num_tokens: int) -> Sequence[int]:
        """The most blocks that a request of so many tokens holds at once in each group, without reservations."""
        longest = num_tokens if self._longest is None else self._longest
        return [group.most_blocks(num_tokens, longest, self.page_size) for group in self.groups]

    def num_fitting(self, num_prompt: int, max_total: int) -> int:
        """The number of requests of this size that fit together."""
        in_blocks = by_pool(self._blocks(max_total))
        in_slots = by_pool(self.demand(num_prompt, max_total))
        most = (*self.num_blocks, *by_pool(self.capacity))
        return min([all // one for one, all in zip((*in_blocks, *in_slots), most, strict=True)])

    def acquire_row(self) -> int:
        """Take a free row."""
        assert self._free_rows, (
            f"all {self.num_rows} rows are held: the scheduler admitted too many requests"
        )
        row = self._free_rows.pop()
        self._held[row] = True
        return row

    def release_row(self, row: int) -> None:
        """Release a row, after its slots and blocks."""
        assert self._held[row], f"row {row} is not held"
        assert not self._slots_of_row[row], (
            f"row {row} still reserves {self._slots_of_row[row]} slots"
        )
        assert not self._num_pages[row], f"row {row} still holds blocks"
        self._held[row] = False
        self._free_rows.append(row)

    def reserve(self, row: int, num_prompt: int, max_total: int) -> None:
        """Reserve the demand of a request for a row (lines 24-26 of Algorithm 1)."""
        assert self._held[row], f"row {row} is not held"
        assert not self._slots_of_row[row], f"row {row} has reserved already"
        assert self.n_slots is not None, "this cache allocates on demand"
        reserved = self.reserved_slots + self.demand(num_prompt, max_total)
        assert not reserved > self.capacity, (
            f"{max_total} more slots than n_slots={self.n_slots} allows"
        )
        self._slots_of_row[row] = self._slots(num_prompt, max_total)
        self.reserved_slots = reserved

    def release(self, row: int) -> None:
        """Release the reservation of a row (line 14 of Algorithm 1)."""
        assert self._slots_of_row[row], f"row {row} reserved nothing"
        self.reserved_slots -= self._sum(self._slots_of_row[row])
        self._slots_of_row[row] = ()

    def slots_of(self, row: int) -> BlockCount:
        """The slots reserved by a row."""
        if self._slots_of_row[row]:
            return self._sum(self._slots_of_row[row])
        return self.no_blocks

    def blocks_of(self, row: int) -> Sequence[Sequence[int]]:
        """Blocks of a row by group, in the order of its tokens; the next `allocate` may extend this view."""
        return self._blocks_of_row[row]

    def num_pages_of(self, row: int) -> int:
        """Pages of a row, with pages that were left: entries of its list of blocks in each group."""
        return self._num_pages[row]

    def lacking(self, row: int, num_tokens: int) -> BlockCount:
        """Blocks to allocate until a row can hold `num_tokens` tokens in all."""
        pages = ceil_div(num_tokens, self.page_size) - self._num_pages[row]
        if pages > 0:
            return pages * self.of_page
        return self.no_blocks

    def behind(self, row: int, start: int) -> BlockCount:
        """Blocks that are free after `leave` with these arguments."""
        if start < self._leaves_at[row]:
            return self.no_blocks  # nearly always
        counts = [0] * len(self._pools)
        for group, layers in self._windows:
            old = self._first[row][group]
            first = self._first_page(layers, row, start)
            if first > old:
                counts[layers.pool] += self._pool_of[group].num_held_once(
                    self._blocks_of_row[row][group][old:first]
                )
        return count_of(counts)

    def room(self, row: int, free: BlockCount) -> int:
        """Tokens in all that a row can hold with `free` blocks more."""
        pages = min(
            [
                number // each
                for number, each in zip(by_pool(free), by_pool(self.of_page), strict=True)
            ]
        )
        return (self._num_pages[row] + pages) * self.page_size

    def to_come(self, row: int | None, start: int, num_tokens: int) -> BlockCount:
        """Blocks that a row allocates at most, beside its own, until it has computed up to `num_tokens`."""
        assert row is not None, "no row"
        pages = ceil_div(num_tokens, self.page_size) - self._num_pages[row]
        if pages <= 0:
            return self.no_blocks
        if not self._windows:
            return pages * self.of_page
        return self._beside(
            [self._num_pages[row] - each for each in self._first[row]], start, num_tokens
        )

    def needed(self, hit: Hit, num_tokens: int) -> BlockCount:
        """Free blocks that a new row with this hit takes until it has computed up to `num_tokens`.

        These are blocks to allocate, kept blocks to share, and kept sources of copies.
        """
        if hit is NO_HIT and not self._windows:
            return ceil_div(num_tokens, self.page_size) * self.of_page
        kept = [0] * len(self._pools)
        held = [0] * len(self.groups)
        for group, layers in enumerate(self.groups if hit.num_tokens else ()):
            # With a copy the row begins behind the full pages: it leaves those that its first token does not read.
            blocks = hit.blocks[group][layers.first_needed(hit.num_tokens) // self.page_size :]
            held[group] = len(blocks)
            kept[layers.pool] += self._pool_of[group].num_kept(
                [*blocks, *hit.sources[group : group + 1]]
            )
        return count_of(kept) + self._beside(held, hit.num_tokens, num_tokens)

    def allocate(self, row: int, num_tokens: int) -> Sequence[Sequence[int]]:
        """Allocate blocks until a row can hold `num_tokens` tokens; returns the new ones by group, usually ()."""
        num_old = self._num_pages[row]
        lacking = ceil_div(num_tokens, self.page_size) - num_old
        if lacking <= 0:
            return _NO_BLOCKS
        if self.n_slots is not None:
            self._check_reserved(row, num_old + lacking, num_tokens)
        new = tuple([pool.take_blocks(lacking) for pool in self._pool_of])
        for blocks, more in zip(self._blocks_of_row[row], new, strict=True):
            blocks += more
        self._num_pages[row] = num_old + lacking
        return new

    def leaves(self, row: int | None, start: int) -> bool:
        """True if `leave` with these arguments gives back a block."""
        return row is not None and start >= self._leaves_at[row]

    def leave(self, row: int, start: int) -> None:
        """Give back the blocks that no token from position `start` on reads."""
        for group, layers in self._windows:
            old = self._first[row][group]
            first = self._first_page(layers, row, start)
            if first > old:
                blocks = self._blocks_of_row[row][group]
                self._pool_of[group].give_back(blocks[old:first], is_behind=True)
                blocks[old:first] = [NO_BLOCK] * (first - old)
                self._first[row][group] = first
        self._leaves_at[row] = self._next_leave(self._first[row])

    def free(self, row: int, owner: Owner = NOBODY) -> None:
        """Free all blocks of a row. Requests still find blocks in the prefix cache; a retention knows their owner."""
        for group, pool in enumerate(self._pool_of):
            blocks = self._blocks_of_row[row][group]
            first = self._first[row][group]
            leaving = None if pool.spans is None else Leaving(owner, group, first)
            pool.give_back(blocks[first:] if first else blocks, leaving=leaving)
        self._blocks_of_row[row] = self._no_lists()
        self._num_pages[row] = 0
        if self._windows:
            self._first[row] = [0] * len(self.groups)
            self._leaves_at[row] = self._next_leave(self._first[row])
        if self.states is not None:
            self.states.free(row)

    def releasable(self, row: int | None) -> BlockCount:
        """Blocks held by this row alone; `free` makes them available."""
        if row is None:
            return self.no_blocks
        lists = zip(self._pool_of, self._blocks_of_row[row], self._first[row], strict=True)
        return self._sum([pool.num_held_once(blocks[first:]) for pool, blocks, first in lists])

    def retain(self, retainer: Retainer) -> None:
        """Let a retention name the pages to give up, from the begin on."""
        for pool in self._pools:
            pool.rank(retainer)
        self.retainer = retainer

    def share(self, row: int, hit: Hit, owner: Owner = NOBODY) -> None:
        """Begin a row with a hit, found before any other change. `free` releases its blocks, `drop` its sources."""
        assert self._held[row] and not self._num_pages[row], f"row {row} is not new"
        for group, pool in enumerate(self._pool_of):
            blocks = list(hit.blocks[group])
            first = blocks.count(NO_BLOCK)
            found = [*blocks[first:], *hit.sources[group : group + 1]]
            pool.share(found)
            if pool.spans is not None:
                pool.spans.used(found, owner)
            self._blocks_of_row[row][group].extend(blocks)
            self._first[row][group] = first
        if self.states is not None:
            self.states.begin(row, hit.num_tokens, hit.state)
        self._num_pages[row] = len(hit.blocks[0])
        self._leaves_at[row] = self._next_leave(self._first[row])

    def drop(self, sources: Sequence[int]) -> None:
        """Release the sources of a hit, when the plan with their copies is made."""
        for pool, source in zip(self._pool_of, sources, strict=bool(sources)):
            pool.give_back((source,))

    def remember(self, row: int, index: int, page: Page) -> Sequence[int]:
        """Add page `index` of a row to the prefix cache; returns the groups in which its content is new."""
        return self.prefixes.remember([blocks[index] for blocks in self._blocks_of_row[row]], page)

    def used_by_group(self) -> tuple[int, ...]:
        """Blocks that rows hold in each group; a shared block counts for each row."""
        used = [sum(self._num_pages)] * len(self.groups)
        for group, _ in self._windows:
            used[group] -= sum(first[group] for first in self._first)
        return tuple(used)

    def check_integrity(self) -> None:
        """Assert that no row, slot or block is lost or counted twice. For tests and debugging; O(blocks).

        Raises:
            AssertionError: the message names the inconsistency.
        """
        free_rows = sorted(self._free_rows)
        assert free_rows == [row for row in range(self.num_rows) if not self._held[row]], (
            "free and held rows differ"
        )
        for row in free_rows:
            assert not any(self._blocks_of_row[row]), (
                f"free row {row} holds blocks {self._blocks_of_row[row]}"
            )
            assert not self._slots_of_row[row], (
                f"free row {row} reserves {self._slots_of_row[row]} slots"
            )
        held: list[list[int]] = [[] for _ in self._pools]
        for row, lists in enumerate(self._blocks_of_row):
            own: list[list[int]] = [[] for _ in self._pools]
            for group, blocks in enumerate(lists):
                first = self._first[row][group]
                assert len(blocks) == self._num_pages[row], (
                    f"row {row} has lists of different lengths"
                )
                assert blocks[:first] == [NO_BLOCK] * first and NO_BLOCK not in blocks[first:], (
                    f"row {row}: {blocks}"
                )
                most = (
                    ceil_div(self._slots_of_row[row][group], self.page_size)
                    if self._slots_of_row[row]
                    else 0
                )
                assert not self.has_reservations or len(blocks) - first <= most, (
                    f"row {row} holds {len(blocks) - first} blocks, and its reservation covers {most}"
                )
                own[self.groups[group].pool] += blocks[first:]
            for pool, each in enumerate(own):
                assert len(set(each)) == len(each), f"row {row} holds a block twice: {each}"
                held[pool] += each
        for pool, each in enumerate(held):
            self._pools[pool].check_integrity(each)
        self.prefixes.check_integrity()
        total = sum([self.slots_of(row) for row in range(self.num_rows)], self.no_blocks)
        assert self.reserved_slots == total, (
            f"reserved_slots is {self.reserved_slots}, the rows' sum is {total}"
        )
        assert not self.has_reservations or not self.reserved_slots > self.capacity, (
            f"{self.reserved_slots} of {self.capacity} slots are reserved"
        )

    def _no_lists(self) -> tuple[list[int], ...]:
        return tuple([[] for _ in self.groups])

    def _sum(self, numbers: Sequence[int]) -> BlockCount:
        """The sum over the groups of each pool."""
        return count_of(sums_by_pool(self.groups, numbers))

    def _blocks(self, num_tokens: int) -> BlockCount:
        """The most blocks that a request of so many tokens holds at once, without reservations."""
        if not self._windows:
            return ceil_div(num_tokens, self.page_size) * self.of_page
        return self._sum(self.blocks_by_group(num_tokens))

    def _slots(self, num_prompt: int, max_total: int) -> tuple[int, ...]:
        """The slots that a request reserves in each group.

        A member of a plan is the whole prompt, from position 0, or one token and its proposals. The first page of a
        window may be read in part, so there is one page more.
        """
        slots = []
        for group in self.groups:
            needed = (
                max_total
                if group.window is None
                else max(num_prompt, group.window + 1 + self._num_drafts)
            )
            slots.append(min(max_total, needed + self.page_size))
        return tuple(slots)

    def _beside(self, held: Sequence[int], start: int, num_tokens: int) -> BlockCount:
        """Blocks of a row at its peak, from position `start` to `num_tokens`, beside the blocks held in each group."""
        longest = self._longest or num_tokens
        size = self.page_size
        most = []
        for group, number in zip(self.groups, held, strict=True):
            pages = ceil_div(num_tokens, size) - group.first_needed(start) // size
            peak = (
                pages
                if group.window is None
                else min(pages, group.most_blocks(num_tokens, longest, size))
            )
            most.append(max(0, peak - number))
        return self._sum(most)

    def _next_leave(self, first: Sequence[int]) -> int:
        """The smallest start with which a row leaves a block, with these first entries of its groups."""
        ends = [
            (first[index] + 1) * self.page_size + (group.window or 1) - 1
            for index, group in self._windows
        ]
        return min(ends, default=0)

    def _first_page(self, group: LayerGroup, row: int, start: int) -> int:
        """The first entry of a row that a token from position `start` on reads."""
        return min(group.first_needed(start) // self.page_size, self._num_pages[row])

    def _check_reserved(self, row: int, num_pages: int, num_tokens: int) -> None:
        for group, slots in enumerate(self._slots_of_row[row] or (0,) * len(self.groups)):
            if self.groups[group].window is None:
                assert num_tokens <= slots, (
                    f"row {row} needs slots for {num_tokens} tokens but reserved {slots}"
                )
            held = num_pages - self._first[row][group]
            most = ceil_div(slots, self.page_size)
            assert held <= most, (
                f"row {row} needs {held} blocks but reserved {most} in group {group}"
            )
