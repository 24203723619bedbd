"""The loop of both TPU attention kernels: over requests and their pages, fetched some steps ahead.

    HBM   kv pages   [N, S, W]        W = K * 2 * D; each token has K then V of head 0, K then V of head 1, ...
          scales     [N, 1, 2K]       of pages of 8 bits
    SMEM  first query, length and context of each row; first and last row of each block; the page table;
          the size of the window; the scales of the pages in VMEM
    VMEM  a ring of buffers, each for the pages of one fetch

    for block in query blocks                   the grid; its length is dynamic, so that padding costs nothing
        for row in rows with queries in block   increments: one for each token; chunks: usually one or two
            for fetch in fetches of the row     from the start of the window to what its last query sees
                start the transfers of the step that has the free buffer next
                wait for these pages, whose transfers began some steps before
                for part in parts of the fetch: the kernel's own work

Words, from the outer loop to the inner one:

    block   a query block: the queries of one program of the grid
    row     a request; its number on the device
    fetch   up to `fetch_pages` consecutive pages of a row, transferred together; numbered from the row's first page
    step    one pass of the loop: a block, a row and a fetch
    part    consecutive pages of a fetch, multiplied together
    buffer  the memory for the pages and scales of a step; steps take the buffers of the ring in turn

Each transfer moves one page, so pages may be scattered. All buffers but that of the current step are being filled, for
the same row, the next rows or the next block: the latency of a transfer is shared by as many. Buffers are zero at
first, and tokens that no query sees become zeros after each fetch: a weight of zero times NaN would be NaN.

A page table above `plan.TABLE_BYTES` does not fit into scalar memory. It is cut into lists of 128 pages, `[R * C, 1,
128]` in HBM, and each step also fetches a list for a later one. 1,024 rows then take 20 KiB, with contexts of 128k
tokens or of ten.

When pages of 8 bits are read, they become bfloat16 and are multiplied by the scale of their page and head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from orca_jax.kernels.ragged_attention.tpu.fetches import Pages, Ref, RowScalars, Step
from orca_jax.kernels.ragged_attention.tpu.shape import TpuShape
from orca_jax.kernels.ragged_attention.tpu.softmax import TpuSoftmax


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
    ring: "Ring"
    writing: Ref | None
    write_sem: Ref | None


class Ring(NamedTuple):
    """The order of buffers and of fetches, in scalar memory."""

    pages: Pages
    current: Ref  # the buffer of the current step
    ahead: Ref  # the step whose pages are fetched next
    listed: Ref | None  # the step whose page list is fetched next

    def begin(self, first: Step) -> None:
        """Start the fetches of the first steps: all buffers but one are filled, and all lists are fetched."""
        pages = self.pages
        count = pages.shape.buffers
        self.current[0] = jnp.int32(0)
        self._put(self.ahead, first)
        if self.listed is not None:
            self._put(self.listed, first)
            lax.fori_loop(0, count - 1, lambda index, _: self._start_list(index), None)

        def fill(index: jax.Array, _: None) -> None:
            pages.clear(index)
            self._start_pages(index)

        lax.fori_loop(0, count - 1, fill, None)
        pages.clear(jnp.int32(count - 1))
        if self.listed is not None:
            self._start_list(jnp.int32(count - 1))

    def before(self, buffer: jax.Array) -> jax.Array:
        """The buffer of the step before; its pages are the next to be overwritten."""
        return jnp.where(buffer == 0, self.pages.shape.buffers, buffer) - 1

    def advance(self, buffer: jax.Array) -> None:
        """Start the next fetches; `buffer` is that of the current step."""
        self._start_pages(self.before(buffer))
        if self.listed is not None:
            self._start_list(buffer)
        last = self.pages.shape.buffers - 1
        self.current[0] = jnp.where(buffer == last, 0, buffer + 1)

    def _start_pages(self, buffer: jax.Array) -> None:
        step = self._get(self.ahead)

        @pl.when(self.pages.rows.exists(step))
        def start() -> None:
            if self.listed is not None:
                self.pages.wait_list(buffer)
            self.pages.start(step, buffer)
            self._put(self.ahead, self.pages.rows.following(step))

    def _start_list(self, buffer: jax.Array) -> None:
        assert self.listed is not None
        step = self._get(self.listed)

        @pl.when(self.pages.rows.exists(step))
        def start() -> None:
            self.pages.start_list(step, buffer)
            self._put(self.listed, self.pages.rows.following(step))

    def _get(self, place: Ref) -> Step:
        return place[0], place[1], place[2]

    def _put(self, place: Ref, step: Step) -> None:
        for index, value in enumerate(step):
            place[index] = value


def walk(refs: Refs, kernel: Kernel) -> None:
    """Run the loop of one block over its rows and their fetches."""
    rows = refs.rows
    pages = refs.pages
    ring = refs.ring
    block = pl.program_id(0) + rows.first_block

    @pl.when(pl.program_id(0) == 0)
    def begin() -> None:
        kernel.begin()
        ring.begin(rows.first_step(block))

    def run(step: Step) -> None:
        buffer = ring.current[0]
        kernel.prepare(step, buffer)
        kernel.release(ring.before(buffer))
        ring.advance(buffer)
        pages.wait(step, buffer)
        pages.clear_unwritten(step, buffer)
        kernel.visit(step, buffer)

    def one_row(row: jax.Array, _: None) -> None:
        kernel.begin_row(row)
        lower, upper = rows.fetches(block, row)
        lax.fori_loop(lower, upper, lambda fetch, _: run((block, row, fetch)), None)

    lax.fori_loop(rows.first_row[block], rows.end_row[block], one_row, None)

    @pl.when(block == rows.end_block - 1)
    def end() -> None:
        lax.fori_loop(0, pages.shape.buffers, lambda buffer, _: kernel.release(buffer), None)


def part_of(pages: Pages, step: Step, buffer: jax.Array, index: jax.Array, num_pages: int) -> Part:
    """Part `index` of a step's fetch, in parts of `num_pages` pages."""
    block, row, fetch = step
    shape = pages.shape
    size = num_pages * pages.shape.page_size
    first = pl.multiple_of(index * size, size)
    place = pl.ds(first, size) if shape.has_values else pl.ds(index * num_pages, num_pages)
    tokens = pages.kv_buf.at[buffer, place]
    scale = None if pages.scale_buf is None else pages.scale_buf.at[buffer]
    begin, end = pages.rows.visible(block, row)
    return Part(
        shape,
        num_pages,
        tokens,
        scale,
        index * num_pages,
        fetch * shape.fetch_tokens + first,
        begin,
        end,
    )
