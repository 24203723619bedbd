"""The loop that both TPU attention kernels share: over requests and their pages, which it fetches a step ahead.

    HBM   kv pages   [N, S, W]        W = K * 2 * D: of a token, K then V of head 0, K then V of head 1, ...
          scales     [N, 1, 2K]       of pages of 8 bits
          page lists [R * C, 1, 128]  the page table, 128 pages a line, so that a line can be fetched by itself
    SMEM  first, length and context of each row, first and last row of each query block; two lines of page lists;
          the scales of the pages in VMEM
    VMEM  two blocks of fetched pages

    for block in query blocks                        the grid, as long as there are tokens: dynamic
        for row in rows with queries in the block    increments: one for each token; chunks: usually one or two
            for fetch in blocks of its pages         as far as its last query sees, from where its window begins
                wait for these pages, which the step before has asked for
                for part in parts of the fetched block: the kernel's own work

Transfers are one page each, however pages are scattered. At each step the next step's pages are asked for, be it
the same row's, the next row's or the next block's, and the line of the page list for the step after that. So scalar
memory does not depend on the context length: 1,024 rows take 20 KiB, of 128k tokens as of ten.

Pages of 8 bits become bfloat16 when they are read, times the scale that K or V of a head has in that page.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from orca_jax.kernels.ragged_attention.tpu.shape import LANES, Shape
from orca_jax.kernels.ragged_attention.tpu.softmax import Softmax

Ref = Any  # Pallas has no public type for references
Item = tuple[jax.Array, jax.Array, jax.Array]
"""One step: query block, row, block of pages."""


class Rows:
    """The scalars of a call, in scalar memory, and what follows from them."""

    def __init__(
        self,
        shape: Shape,
        span: Any,
        first_row: Any,
        end_row: Any,
        start: Any,
        length: Any,
        context: Any,
        first_page: Any,
    ) -> None:
        self.shape, self.first_page = shape, first_page
        self.first_block, self.end_block = span[0], span[1]
        self.first_row, self.end_row = first_row, end_row
        self.start, self.length, self.context = start, length, context

    def visible(self, block: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) position that the row's queries in a block see."""
        size = self.shape.query_block
        first = jnp.maximum(block * size - self.start[row], 0)
        end = jnp.minimum((block + 1) * size - self.start[row], self.length[row])
        before = self.context[row] - self.length[row]
        if self.shape.sliding_window is None:
            return jnp.zeros_like(before), before + end
        return jnp.maximum(before + first + 1 - self.shape.sliding_window, 0), before + end

    def fetches(self, block: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Blocks of pages to visit."""
        begin, end = self.visible(block, row)
        return begin // self.shape.fetch_tokens, pl.cdiv(end, self.shape.fetch_tokens)

    def tokens(self, item: Item) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) token of a step's fetched block that the row's queries see."""
        begin, end = self.visible(item[0], item[1])
        first = item[2] * self.shape.fetch_tokens
        return jnp.maximum(begin - first, 0), jnp.minimum(end - first, self.shape.fetch_tokens)

    def num_pages(self, item: Item) -> jax.Array:
        """Pages of a step."""
        block, row, fetch = item
        _, end = self.visible(block, row)
        return jnp.minimum(pl.cdiv(end, self.shape.page_size) - fetch * self.shape.fetch_pages, self.shape.fetch_pages)

    def first_item(self, block: jax.Array) -> Item:
        """First step of a query block."""
        row = self.first_row[block]
        return block, row, self.fetches(block, row)[0]

    def exists(self, item: Item) -> jax.Array:
        """Whether there is such a step."""
        return item[0] < self.end_block

    def following(self, item: Item) -> Item:
        """The step after `item`; one in `end_block` where that was the last."""
        block, row, fetch = item
        is_inside = block < self.end_block
        safe = jnp.minimum(block, self.end_block - 1)
        same_row = is_inside & (fetch + 1 < self.fetches(safe, row)[1])
        same_block = is_inside & (same_row | (row + 1 < self.end_row[safe]))
        next_block = jnp.where(same_block, block, jnp.minimum(block + 1, self.end_block))
        new_block = jnp.minimum(next_block, self.end_block - 1)
        next_row = jnp.where(same_row, row, jnp.where(same_block, row + 1, self.first_row[new_block]))
        next_fetch = jnp.where(same_row, fetch + 1, self.fetches(new_block, next_row)[0])
        return next_block, next_row, next_fetch


@dataclass(frozen=True)
class Pages:
    """Fetches pages, their scales and lines of page lists. Slot `s` of each buffer belongs to every second step."""

    shape: Shape
    rows: Rows
    lists: Ref
    kv: Ref
    scale: Ref | None
    list_buf: Ref
    kv_buf: Ref
    scale_buf: Ref | None
    list_sem: Ref
    kv_sem: Ref
    scale_sem: Ref | None

    def _list_copy(self, line: jax.Array, slot: jax.Array) -> Any:
        return pltpu.make_async_copy(self.lists.at[line], self.list_buf.at[slot], self.list_sem.at[slot])

    def _page_copies(self, page: jax.Array, place: jax.Array, slot: jax.Array) -> Iterable[Any]:
        size = self.shape.page_size
        there = self.kv_buf.at[slot, pl.ds(pl.multiple_of(place * size, size), size)]
        yield pltpu.make_async_copy(self.kv.at[page], there, self.kv_sem.at[slot])
        if self.scale is not None and self.scale_buf is not None and self.scale_sem is not None:
            there = self.scale_buf.at[slot, place]
            yield pltpu.make_async_copy(self.scale.at[page], there, self.scale_sem.at[slot])

    def start_list(self, item: Item, slot: jax.Array) -> None:
        """Ask for the line with the pages of a step."""
        lines_per_row = self.lists.shape[0] // self.rows.start.shape[0]
        line = item[1] * lines_per_row + item[2] * self.shape.fetch_pages // LANES
        self._list_copy(line, slot).start()

    def wait_list(self, slot: jax.Array) -> None:
        """Wait for a line."""
        self._list_copy(jnp.int32(0), slot).wait()

    def page(self, item: Item, place: jax.Array, slot: jax.Array) -> jax.Array:
        """The page at a place of a step's fetched block; its line must still be there."""
        of_line = lax.rem(item[2] * self.shape.fetch_pages, LANES) + place
        page: jax.Array = self.list_buf[slot, 0, of_line] + self.rows.first_page[0]
        return page

    def start(self, item: Item, slot: jax.Array) -> None:
        """Ask for the pages of a step; the line must have come."""

        def ask(place: jax.Array, _: None) -> None:
            for copy in self._page_copies(self.page(item, place, slot), place, slot):
                copy.start()

        lax.fori_loop(0, self.rows.num_pages(item), ask, None)

    def wait(self, item: Item, slot: jax.Array) -> None:
        """Wait for the pages of a step."""

        def wait_one(place: jax.Array, _: None) -> None:
            for copy in self._page_copies(jnp.int32(0), place, slot):
                copy.wait()

        lax.fori_loop(0, self.rows.num_pages(item), wait_one, None)


@dataclass(frozen=True)
class Part:
    """Some pages of a fetched block: what is multiplied at a time."""

    shape: Shape
    num_pages: int
    tokens: Ref  # [num_pages * S, W]
    scale: Ref | None  # [fetch_pages, 1, 2K]
    first_page: jax.Array  # in the fetched block
    first: jax.Array  # position of the first token
    end: jax.Array  # nobody sees this position, or any behind it

    @property
    def size(self) -> int:
        """Tokens."""
        return self.num_pages * self.shape.page_size

    def positions(self, rows: int) -> jax.Array:
        """Of the tokens `[rows, size]`."""
        return self.first + lax.broadcasted_iota(jnp.int32, (rows, self.size), 1)

    def silence(self) -> None:
        """Overwrite what no request wrote by zeros: it may be anything, and zero weight does not silence NaN."""
        left = self.end - self.first

        @pl.when(left < self.size)
        def overwrite() -> None:
            is_token = lax.broadcasted_iota(jnp.int32, self.tokens.shape, 0) < left
            tokens = self.tokens[...].astype(jnp.float32) if self.shape.is_quantised else self.tokens[...]
            self.tokens[...] = jnp.where(is_token, tokens, jnp.zeros_like(tokens)).astype(self.tokens.dtype)

    def stored(self, lanes: slice) -> jax.Array:
        """K or V of a head, or both of some heads, in the type that is multiplied; without their scales."""
        return self.tokens[:, lanes].astype(self.shape.compute_dtype)

    def read(self, lanes: slice) -> jax.Array:
        """The same, with their scales."""
        if self.scale is None:
            return self.stored(lanes)
        size, dim = self.shape.page_size, self.shape.head_dim
        lane = lax.broadcasted_iota(jnp.int32, (1, lanes.stop - lanes.start), 1)
        pages = []
        for page in range(self.num_pages):
            scales = [self._scale(page, index) for index in range(lanes.start // dim, lanes.stop // dim)]
            tokens = self.tokens[page * size : (page + 1) * size, lanes].astype(jnp.float32)
            pages.append(tokens * _steps(lane, dim, scales))
        return jnp.concatenate(pages, axis=0).astype(self.shape.compute_dtype)

    def scales(self, first_head: int, heads: int, part: int) -> jax.Array:
        """Of each score of a bundle of heads `[M, tokens]`: those of K (`part` 0) or of V (1)."""
        size = self.shape.together * self.shape.groups, self.size
        row, token = (lax.broadcasted_iota(jnp.int32, size, axis) for axis in (0, 1))
        of_heads = []
        for head in range(first_head, first_head + heads):
            of_pages = [self._scale(page, 2 * head + part) for page in range(self.num_pages)]
            of_heads.append(_steps(token, self.shape.page_size, of_pages))
        return _steps(row, self.shape.groups, of_heads)

    def _scale(self, page: int, index: int) -> jax.Array:
        """K's or V's of a head in a page; zero past the end, where no scale was fetched."""
        assert self.scale is not None
        is_there = self.first + page * self.shape.page_size < self.end
        return jnp.where(is_there, self.scale[self.first_page + page, 0, index], 0.0)


def _steps(index: jax.Array, width: int, values: list[jax.Array]) -> jax.Array:
    """The value whose turn it is at each index, when each has its turn for `width` of them."""
    result = values[0]
    for turn, value in enumerate(values[1:], 1):
        result = jnp.where(index >= turn * width, value, result)
    return result


class Kernel:
    """What a kernel does at each turn of the loop."""

    def begin(self) -> None:
        """Before anything else."""

    def begin_row(self, row: jax.Array) -> None:
        """Before a row's first step in a query block."""

    def end_row(self, row: jax.Array) -> None:
        """After its last."""

    def prepare(self, item: Item, slot: jax.Array) -> None:
        """Before the line of a step's page list is overwritten."""

    def release(self, slot: jax.Array) -> None:
        """Before the pages in a slot are overwritten, and at the end."""

    def visit(self, item: Item, slot: jax.Array) -> None:
        """Compute with the pages of a step, while the next ones come."""
        raise NotImplementedError


class Refs(NamedTuple):
    """The references of a kernel by their roles."""

    rows: Rows
    pages: Pages
    q: Ref
    new: Ref | None
    out: Ref
    softmax: Softmax
    parity: Ref
    writing: Ref | None
    write_sem: Ref | None


def walk(refs: Refs, kernel: Kernel) -> None:
    """The loop of one query block over rows and their pages."""
    rows, pages, parity = refs.rows, refs.pages, refs.parity
    block = pl.program_id(0) + rows.first_block

    @pl.when(pl.program_id(0) == 0)
    def begin() -> None:
        first = rows.first_item(block)
        zero = jnp.int32(0)
        parity[0] = zero
        kernel.begin()
        pages.start_list(first, zero)
        pages.wait_list(zero)
        pages.start(first, zero)
        second = rows.following(first)

        @pl.when(rows.exists(second))
        def ask() -> None:
            pages.start_list(second, jnp.int32(1))

    def step(item: Item) -> None:
        slot = parity[0]
        other = 1 - slot
        following = rows.following(item)
        after = rows.following(following)
        kernel.prepare(item, slot)
        kernel.release(other)

        @pl.when(rows.exists(following))
        def fetch() -> None:
            pages.wait_list(other)
            pages.start(following, other)

        @pl.when(rows.exists(after))
        def ask() -> None:
            pages.start_list(after, slot)

        pages.wait(item, slot)
        kernel.visit(item, slot)
        parity[0] = other
        pl.when(jnp.logical_not(rows.exists(following)))(lambda: kernel.release(slot))

    def one_row(row: jax.Array, _: None) -> None:
        kernel.begin_row(row)
        lower, upper = rows.fetches(block, row)
        lax.fori_loop(lower, upper, lambda fetch, _: step((block, row, fetch)), None)
        kernel.end_row(row)

    lax.fori_loop(rows.first_row[block], rows.end_row[block], one_row, None)


def part_of(pages: Pages, item: Item, slot: jax.Array, index: jax.Array, num_pages: int) -> Part:
    """The fetched block's part `index` of `num_pages` pages; what nobody sees of it is zeros."""
    block, row, fetch = item
    shape, size = pages.shape, num_pages * pages.shape.page_size
    place = pl.multiple_of(index * size, size)
    tokens = pages.kv_buf.at[slot, pl.ds(place, size)]
    scale = None if pages.scale_buf is None else pages.scale_buf.at[slot]
    _, end = pages.rows.visible(block, row)
    part = Part(shape, num_pages, tokens, scale, index * num_pages, fetch * shape.fetch_tokens + place, end)
    part.silence()
    return part
