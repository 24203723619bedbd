"""The loop of both TPU attention kernels: over requests and their pages, fetched one step ahead.

    HBM   kv pages   [N, S, W]        W = K * 2 * D; each token has K then V of head 0, K then V of head 1, ...
          scales     [N, 1, 2K]       of pages of 8 bits
          page lists [R * C, 1, 128]  the page table, cut into lists of 128 pages that can be fetched by themselves
    SMEM  first query, length and context of each row; first and last row of each block; two page lists;
          the size of the window; the scales of the pages in VMEM
    VMEM  two buffers, each for the pages of one fetch

    for block in query blocks                   the grid; its length is dynamic, so that padding costs nothing
        for row in rows with queries in block   increments: one for each token; chunks: usually one or two
            for fetch in fetches of the row     from the start of the window to what its last query sees
                wait for these pages, whose transfers began in the step before
                for part in parts of the fetch: the kernel's own work

Words, from the outer loop to the inner one:

    block   a query block: the queries of one program of the grid
    row     a request; its number on the device
    fetch   up to `fetch_pages` consecutive pages of a row, transferred together; numbered from the row's first page
    step    one pass of the loop: a block, a row and a fetch
    part    consecutive pages of a fetch, multiplied together
    buffer  0 or 1: the memory for the pages, scales and page list of a step; steps alternate between the two

Each transfer moves one page, so pages may be scattered. Each step starts the transfers of the next step's pages, which
may belong to the same row, the next row or the next block. It also starts the transfer of the page list for the step
after that. So scalar memory does not depend on the context length: 1,024 rows take 20 KiB, with contexts of 128k tokens
or of ten.

When pages of 8 bits are read, they become bfloat16 and are multiplied by the scale of their page and head.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from orca_jax.kernels.ragged_attention.tpu.shape import LANES, TpuShape
from orca_jax.kernels.ragged_attention.tpu.softmax import TpuSoftmax

Ref = Any  # Pallas has no public type for references
Step = tuple[jax.Array, jax.Array, jax.Array]
"""Block, row and fetch."""


class RowScalars:
    """The scalars of a call, in scalar memory: blocks, rows and their lengths, and the order of steps."""

    def __init__(
        self,
        shape: TpuShape,
        ends: Any,
        first_row: Any,
        end_row: Any,
        start: Any,
        length: Any,
        context: Any,
        first_page: Any,
        window: Any,
    ) -> None:
        self.shape = shape
        self.first_page = first_page
        self.window = window
        self.first_block = ends[0]
        self.end_block = ends[1]
        self.first_row = first_row
        self.end_row = end_row
        self.start = start
        self.length = length
        self.context = context

    def visible(self, block: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) position visible to the row's queries in a block."""
        size = self.shape.query_block
        first = jnp.maximum(block * size - self.start[row], 0)
        end = jnp.minimum((block + 1) * size - self.start[row], self.length[row])
        before = self.context[row] - self.length[row]
        if not self.shape.has_window:
            return jnp.zeros_like(before), before + end
        return jnp.maximum(before + first + 1 - self.window[0], 0), before + end

    def fetches(self, block: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) fetch of a row for a block."""
        begin, end = self.visible(block, row)
        return begin // self.shape.fetch_tokens, pl.cdiv(end, self.shape.fetch_tokens)

    def tokens(self, step: Step) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) visible token of a step's fetch, for the row's queries."""
        begin, end = self.visible(step[0], step[1])
        first = step[2] * self.shape.fetch_tokens
        return jnp.maximum(begin - first, 0), jnp.minimum(end - first, self.shape.fetch_tokens)

    def num_pages(self, step: Step) -> jax.Array:
        """Number of pages of a step's fetch up to the last one that a query of the row sees."""
        block, row, fetch = step
        _, end = self.visible(block, row)
        return jnp.minimum(
            pl.cdiv(end, self.shape.page_size) - fetch * self.shape.fetch_pages,
            self.shape.fetch_pages,
        )

    def first_page_of(self, step: Step) -> jax.Array | int:
        """Index of the first page of a step's fetch that a query of the row sees."""
        if not self.shape.has_window:
            return 0
        return self.tokens(step)[0] // self.shape.page_size

    def first_step(self, block: jax.Array) -> Step:
        """First step of a block."""
        row = self.first_row[block]
        return block, row, self.fetches(block, row)[0]

    def exists(self, step: Step) -> jax.Array:
        """True if the step is not past the last one."""
        return step[0] < self.end_block

    def following(self, step: Step) -> Step:
        """The step after `step`; after the last one, a step in `end_block`."""
        block, row, fetch = step
        is_inside = block < self.end_block
        safe = jnp.minimum(block, self.end_block - 1)
        same_row = is_inside & (fetch + 1 < self.fetches(safe, row)[1])
        same_block = is_inside & (same_row | (row + 1 < self.end_row[safe]))
        next_block = jnp.where(same_block, block, jnp.minimum(block + 1, self.end_block))
        new_block = jnp.minimum(next_block, self.end_block - 1)
        next_row = jnp.where(
            same_row, row, jnp.where(same_block, row + 1, self.first_row[new_block])
        )
        next_fetch = jnp.where(same_row, fetch + 1, self.fetches(new_block, next_row)[0])
        return next_block, next_row, next_fetch


@dataclass(frozen=True)
class Pages:
    """The transfers of pages, their scales and page lists into the two buffers."""

    shape: TpuShape
    rows: RowScalars
    lists: Ref
    kv: Ref
    scale: Ref | None
    list_buf: Ref
    kv_buf: Ref
    scale_buf: Ref | None
    list_sem: Ref
    kv_sem: Ref
    scale_sem: Ref | None

    def _list_copy(self, index: jax.Array, buffer: jax.Array) -> Any:
        return pltpu.make_async_copy(
            self.lists.at[index], self.list_buf.at[buffer], self.list_sem.at[buffer]
        )

    def _page_copies(self, page: jax.Array, index: jax.Array, buffer: jax.Array) -> Iterable[Any]:
        there = self.kv_buf.at[buffer, self.shape.place_of(index)]
        stored = self.kv.at[page] if self.shape.has_values else self.kv.at[page, 0]
        yield pltpu.make_async_copy(stored, there, self.kv_sem.at[buffer])
        if self.scale is not None and self.scale_buf is not None and self.scale_sem is not None:
            there = self.scale_buf.at[buffer, index]
            yield pltpu.make_async_copy(self.scale.at[page], there, self.scale_sem.at[buffer])

    def start_list(self, step: Step, buffer: jax.Array) -> None:
        """Start the transfer of the page list of a step."""
        lists_per_row = self.lists.shape[0] // self.rows.start.shape[0]
        index = step[1] * lists_per_row + step[2] * self.shape.fetch_pages // LANES
        self._list_copy(index, buffer).start()

    def wait_list(self, buffer: jax.Array) -> None:
        """Wait for a page list."""
        self._list_copy(jnp.int32(0), buffer).wait()

    def page(self, step: Step, index: jax.Array, buffer: jax.Array) -> jax.Array:
        """The page at an index of a step's fetch; the step's page list must still be in the buffer."""
        in_list = lax.rem(step[2] * self.shape.fetch_pages, LANES) + index
        page: jax.Array = self.list_buf[buffer, 0, in_list] + self.rows.first_page[0]
        return page

    def start(self, step: Step, buffer: jax.Array) -> None:
        """Start the transfers of a step's pages; its page list must be in the buffer."""

        def start_one(index: jax.Array, _: None) -> None:
            for copy in self._page_copies(self.page(step, index, buffer), index, buffer):
                copy.start()

        lax.fori_loop(self.rows.first_page_of(step), self.rows.num_pages(step), start_one, None)

    def wait(self, step: Step, buffer: jax.Array) -> None:
        """Wait for the pages of a step."""

        def wait_one(index: jax.Array, _: None) -> None:
            for copy in self._page_copies(jnp.int32(0), index, buffer):
                copy.wait()

        lax.fori_loop(self.rows.first_page_of(step), self.rows.num_pages(step), wait_one, None)


@dataclass(frozen=True)
class Part:
    """Consecutive pages of a fetch, multiplied together."""

    shape: TpuShape
    num_pages: int
    tokens: Ref  # [num_pages * S, W], or [num_pages, D, S] of latents
    scale: Ref | None  # [fetch_pages, 1, 2K], or [fetch_pages, 1, S]
    first_page: jax.Array  # index in the fetch
    first: jax.Array  # position of the first token
    begin: jax.Array  # positions before this one are visible to no query
    end: jax.Array  # neither are positions from here on

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.num_pages * self.shape.page_size

    def positions(self, rows: int) -> jax.Array:
        """Positions of the tokens, `[rows, size]`."""
        return self.first + lax.broadcasted_iota(jnp.int32, (rows, self.size), 1)

    def clear_unwritten(self) -> None:
        """Set the tokens from `end` on to zero: unwritten memory may hold NaN, and NaN times zero is NaN."""
        left = self.end - self.first
        pl.when(left < self.size)(lambda: self._keep(lambda token: token < left))

    def clear_passed(self) -> None:
        """Set the tokens before a window to zero: their memory may hold NaN, or was not fetched."""
        if self.shape.has_window:
            passed = self.begin - self.first
            pl.when(passed > 0)(lambda: self._keep(lambda token: token >= passed))

    def _keep(self, is_kept: Callable[[jax.Array], jax.Array]) -> None:
        """Set the other tokens to zero."""
        mask = is_kept(self._indices())
        tokens = self.tokens[...]
        if self.shape.is_quantised:
            tokens = tokens.astype(jnp.int32 if tokens.dtype == jnp.uint8 else jnp.float32)
        self.tokens[...] = jnp.where(mask, tokens, jnp.zeros_like(tokens)).astype(self.tokens.dtype)

    def _indices(self) -> jax.Array:
        """The index of the token of each stored value."""
        if self.shape.has_values:
            return lax.broadcasted_iota(jnp.int32, self.tokens.shape, 0)
        page, slot = (lax.broadcasted_iota(jnp.int32, self.tokens.shape, axis) for axis in (0, 2))
        return page * self.shape.page_size + slot

    def stored(self, lanes: slice) -> jax.Array:
        """Stored values of some lanes (K or V of a head, or both of some heads) in the type of products, not scaled."""
        return self.tokens[:, lanes].astype(self.shape.compute_dtype)

    def read(self, lanes: slice) -> jax.Array:
        """The same values, multiplied by their scales."""
        if self.scale is None:
            return self.stored(lanes)
        size = self.shape.page_size
        dim = self.shape.head_dim
        lane = lax.broadcasted_iota(jnp.int32, (1, lanes.stop - lanes.start), 1)
        pages = []
        for page in range(self.num_pages):
            scales = [
                self._scale(page, index) for index in range(lanes.start // dim, lanes.stop // dim)
            ]
            tokens = self.tokens[page * size : (page + 1) * size, lanes].astype(jnp.float32)
            pages.append(tokens * _piecewise(lane, dim, scales))
        return jnp.concatenate(pages, axis=0).astype(self.shape.compute_dtype)

    def scales(self, first_head: int, heads: int, part: int) -> jax.Array:
        """Scales for each score of a bundle of heads, `[M, tokens]`: of K if `part` is 0, of V if it is 1."""
        size = self.shape.bundle_heads * self.shape.groups, self.size
        row, token = (lax.broadcasted_iota(jnp.int32, size, axis) for axis in (0, 1))
        of_heads = []
        for head in range(first_head, first_head + heads):
            of_pages = [self._scale(page, 2 * head + part) for page in range(self.num_pages)]
            of_heads.append(_piecewise(token, self.shape.page_size, of_pages))
        return _piecewise(row, self.shape.groups, of_heads)

    def _scale(self, page: int, index: int) -> jax.Array:
        """Scale of K or of V of one head in a page; zero for pages that are not fetched."""
        assert self.scale is not None
        first = self.first + page * self.shape.page_size
        is_there = first < self.end
        if self.shape.has_window:
            is_there &= first + self.shape.page_size > self.begin
        return jnp.where(is_there, self.scale[self.first_page + page, 0, index], 0.0)


def _piecewise(index: jax.Array, width: int, values: list[jax.Array]) -> jax.Array:
    """A piecewise constant function of `index`: each value holds for `width` indices, one value after the other."""
    result = values[0]
    for number, value in enumerate(values[1:], 1):
        result = jnp.where(index >= number * width, value, result)
    return result


class Kernel:
    """The work of a kernel at the points of the loop."""

    def begin(self) -> None:
        """Run once before the first step."""

    def begin_row(self, row: jax.Array) -> None:
        """Run before the first step of a row in a block."""

    def end_row(self, row: jax.Array) -> None:
        """Run after the last step of a row in a block."""

    def prepare(self, step: Step, buffer: jax.Array) -> None:
        """Run before the page list of a step is overwritten."""

    def release(self, buffer: jax.Array) -> None:
        """Run before the pages in a buffer are overwritten, and after the last step."""

    def visit(self, step: Step, buffer: jax.Array) -> None:
        """Compute with the pages of a step, while the next ones are transferred."""
        raise NotImplementedError


class Refs(NamedTuple):
    """The references of a kernel, by role."""

    rows: RowScalars
    pages: Pages
    q: Ref
    new: Ref | None
    out: Ref
    softmax: TpuSoftmax
    parity: Ref
    writing: Ref | None
    write_sem: Ref | None


def walk(refs: Refs, kernel: Kernel) -> None:
    """Run the loop of one block over its rows and their fetches."""
    rows = refs.rows
    pages = refs.pages
    parity = refs.parity
    block = pl.program_id(0) + rows.first_block

    @pl.when(pl.program_id(0) == 0)
    def begin() -> None:
        first = rows.first_step(block)
        zero = jnp.int32(0)
        parity[0] = zero
        kernel.begin()
        pages.start_list(first, zero)
        pages.wait_list(zero)
        pages.start(first, zero)
        second = rows.following(first)

        @pl.when(rows.exists(second))
        def start_list() -> None:
            pages.start_list(second, jnp.int32(1))

    def run(step: Step) -> None:
        buffer = parity[0]
        other = 1 - buffer
        following = rows.following(step)
        after = rows.following(following)
        kernel.prepare(step, buffer)
        kernel.release(other)

        @pl.when(rows.exists(following))
        def start_pages() -> None:
            pages.wait_list(other)
            pages.start(following, other)

        @pl.when(rows.exists(after))
        def start_list() -> None:
            pages.start_list(after, buffer)

        pages.wait(step, buffer)
        kernel.visit(step, buffer)
        parity[0] = other
        pl.when(jnp.logical_not(rows.exists(following)))(lambda: kernel.release(buffer))

    def one_row(row: jax.Array, _: None) -> None:
        kernel.begin_row(row)
        lower, upper = rows.fetches(block, row)
        lax.fori_loop(lower, upper, lambda fetch, _: run((block, row, fetch)), None)
        kernel.end_row(row)

    lax.fori_loop(rows.first_row[block], rows.end_row[block], one_row, None)


def part_of(pages: Pages, step: Step, buffer: jax.Array, index: jax.Array, num_pages: int) -> Part:
    """Part `index` of a step's fetch, in parts of `num_pages` pages; tokens past the last one become zeros."""
    block, row, fetch = step
    shape = pages.shape
    size = num_pages * pages.shape.page_size
    first = pl.multiple_of(index * size, size)
    place = pl.ds(first, size) if shape.has_values else pl.ds(index * num_pages, num_pages)
    tokens = pages.kv_buf.at[buffer, place]
    scale = None if pages.scale_buf is None else pages.scale_buf.at[buffer]
    begin, end = pages.rows.visible(block, row)
    part = Part(
        shape,
        num_pages,
        tokens,
        scale,
        index * num_pages,
        fetch * shape.fetch_tokens + first,
        begin,
        end,
    )
    part.clear_unwritten()
    return part
