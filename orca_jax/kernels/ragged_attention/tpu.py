"""Ragged attention for TPUs, in Pallas (Mosaic), over packed pages.

    HBM   kv pages  [N, S, W]        W = K * 2 * D: of a token, K then V of head 0, K then V of head 1, ...
          page lists [R * C, 1, 128]  the page table, 128 pages a line, so that a line can be fetched by itself
    SMEM  first, length and context of each row, first and last row of each query block; two lines of page lists
    VMEM  a block of queries and of outputs; two blocks of fetched pages; maximum, sum and values of each query

Two kernels share one loop, and a mixed iteration is both, one after the other: increments are the first rows and their
queries the first tokens, so each kernel has a run of query blocks of its own, and one that has none runs no step.

    for block in query blocks                        the grid, as long as there are tokens: dynamic
        for row in rows with queries in the block    increments: one for each token; chunks: usually one or two
            for fetch in blocks of its pages         as far as its last query sees, from where its window begins
                wait for these pages, which the step before has asked for
                for part in parts of the fetched block: scores, online softmax, weighted values

Transfers are one page each, however pages are scattered. At each step the next step's pages are asked for, be it
the same row's, the next row's or the next block's, and the line of the page list for the step after that. So scalar
memory does not depend on the context length: 1,024 rows take 20 KiB, of 128k tokens as of ten.

*Increments* have G queries for each KV head, too few for a matrix unit that takes eight rows at once. Several KV heads
are multiplied together, until there are eight rows or the lanes of the heads fill whole registers: the queries of
a head are zero in the lanes of the others and, where D is no multiple of 128, in V's lanes. The tiles of keys that
the matrix unit loads are the same ones; only rows that would be padding are used.

*Chunks* multiply `block` queries of one head at a time. Where a block has several requests each is visited
with the others' queries masked, which leaves their sums alone; nothing is written until the block is done.

Scores and sums are float32. Pages in bfloat16 are multiplied as they are, with the weights rounded to bfloat16.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages, PackedPages, num_kv_heads
from orca_jax.kernels.ragged_attention.tpu_blocks import Blocks, Heads, choose_blocks

_LANES = 128
_SUBLANES = 8
_VMEM_LIMIT = 32 << 20  # bytes of one kernel; chips have 64 MiB or more, and half is left to what XLA keeps there
_LOG2E = math.log2(math.e)
_MASKED = -1e30  # finite: a fully masked block must not make NaN out of inf - inf

Item = tuple[jax.Array, jax.Array, jax.Array]
"""One step: query block, row, block of pages."""


@dataclass(frozen=True)
class _Shape:
    """What a kernel is compiled for."""

    num_kv_heads: int
    groups: int  # G
    head_dim: int
    page_size: int
    query_block: int
    fetch_pages: int
    compute_pages: int
    sliding_window: int | None
    soft_cap: float | None
    compute_dtype: Any

    @property
    def fetch_tokens(self) -> int:
        """Tokens in a fetched block."""
        return self.fetch_pages * self.page_size

    @property
    def compute_tokens(self) -> int:
        """Tokens that are multiplied at a time."""
        return self.compute_pages * self.page_size

    @property
    def splits_kv(self) -> bool:
        """Whether K and V of a head fill whole registers, so that each can be read without the other."""
        return self.head_dim % _LANES == 0

    @property
    def lanes(self) -> int:
        """Lanes that queries of one head are multiplied with, and that their outputs have."""
        return self.head_dim if self.splits_kv else 2 * self.head_dim

    @property
    def together(self) -> int:
        """KV heads that increments are multiplied with at once."""
        if self.splits_kv:
            return 1
        heads = range(1, self.num_kv_heads)
        fitting = (n for n in heads if n * self.lanes % _LANES == 0 and n * self.groups >= _SUBLANES)
        return next(fitting, self.num_kv_heads)

    @cached_property
    def bundles(self) -> tuple[tuple[int, int], ...]:
        """First lane and number of KV heads of each such bundle; the last may have fewer heads."""
        firsts = range(0, self.num_kv_heads, self.together)
        return tuple((2 * self.head_dim * h, min(self.together, self.num_kv_heads - h)) for h in firsts)

    def kv_lanes(self, first: int, heads: int) -> tuple[slice, slice]:
        """Lanes of the keys and of the values of some heads: the same where they share registers."""
        if self.splits_kv:
            middle = first + self.head_dim
            return slice(first, middle), slice(middle, middle + self.head_dim)
        both = slice(first, first + heads * self.lanes)
        return both, both

    @property
    def precision(self) -> lax.Precision:
        """Of matrix products."""
        return lax.Precision.HIGHEST if self.compute_dtype == jnp.float32 else lax.Precision.DEFAULT


class _Rows:
    """The scalars of a call, in scalar memory, and what follows from them."""

    def __init__(
        self, shape: _Shape, span: Any, first_row: Any, end_row: Any, start: Any, length: Any, context: Any
    ) -> None:
        self.shape = shape
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


class _Pages:
    """Fetches pages and lines of page lists. Slot `s` of each buffer belongs to every second step."""

    def __init__(
        self, shape: _Shape, rows: _Rows, lists: Any, kv: Any, list_buf: Any, kv_buf: Any, list_sem: Any, kv_sem: Any
    ) -> None:
        self.shape, self.rows = shape, rows
        self.lists, self.kv = lists, kv
        self.list_buf, self.kv_buf = list_buf, kv_buf
        self.list_sem, self.kv_sem = list_sem, kv_sem
        self.lines_per_row = lists.shape[0] // rows.start.shape[0]

    def _list_copy(self, line: jax.Array, slot: jax.Array) -> Any:
        return pltpu.make_async_copy(self.lists.at[line], self.list_buf.at[slot], self.list_sem.at[slot])

    def _page_copy(self, page: jax.Array, place: jax.Array, slot: jax.Array) -> Any:
        size = self.shape.page_size
        there = self.kv_buf.at[slot, pl.ds(pl.multiple_of(place * size, size), size)]
        return pltpu.make_async_copy(self.kv.at[page], there, self.kv_sem.at[slot])

    def start_list(self, item: Item, slot: jax.Array) -> None:
        """Ask for the line with the pages of a step."""
        line = item[1] * self.lines_per_row + item[2] * self.shape.fetch_pages // _LANES
        self._list_copy(line, slot).start()

    def wait_list(self, slot: jax.Array) -> None:
        """Wait for a line."""
        self._list_copy(jnp.int32(0), slot).wait()

    def start(self, item: Item, slot: jax.Array) -> None:
        """Ask for the pages of a step; the line must have come."""
        offset = lax.rem(item[2] * self.shape.fetch_pages, _LANES)

        def ask(place: jax.Array, _: None) -> None:
            self._page_copy(self.list_buf[slot, 0, offset + place], place, slot).start()

        lax.fori_loop(0, self.rows.num_pages(item), ask, None)

    def wait(self, item: Item, slot: jax.Array) -> None:
        """Wait for the pages of a step."""
        lax.fori_loop(
            0, self.rows.num_pages(item), lambda place, _: self._page_copy(jnp.int32(0), place, slot).wait(), None
        )


@dataclass(frozen=True)
class _Softmax:
    """Online softmax of some queries in VMEM: their maximum in every lane of `top`, sums over tokens, weighted values.

    Lanes are crossed for the maximum alone: what is the same in all lanes needs no broadcast, and `total` has a sum
    for each lane until the end. Both would cost as many cycles as a product.
    """

    shape: _Shape
    top: Any
    total: Any
    values: Any

    def clear(self) -> None:
        """Begin anew."""
        self.top[...] = jnp.full_like(self.top, _MASKED)
        self.total[...] = jnp.zeros_like(self.total)
        self.values[...] = jnp.zeros_like(self.values)

    def add(self, index: int, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array | None) -> None:
        """Take `k` and `v` `[tokens, lanes]` into the sums of the queries `q [M, lanes]`; None sees everything."""
        shape = self.shape
        k, v = k.astype(shape.compute_dtype), v.astype(shape.compute_dtype)
        product = partial(lax.dot_general, precision=shape.precision, preferred_element_type=jnp.float32)
        scores = product(q, k, (((1,), (1,)), ((), ())))
        if shape.soft_cap is not None:
            scores = shape.soft_cap * _LOG2E * jnp.tanh(scores / shape.soft_cap)
        if visible is not None:
            scores = jnp.where(visible, scores, _MASKED)
        before = self.top[index]
        top = jnp.maximum(before, jnp.broadcast_to(scores.max(axis=1, keepdims=True), before.shape))
        weights = jnp.exp2(scores - _repeat(top, scores.shape[1]))
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)
        shrink = jnp.exp2(before - top)
        weighted = product(weights.astype(v.dtype), v, (((1,), (0,)), ((), ())))
        lanes = v.shape[1]
        self.values[index, :, :lanes] = self.values[index, :, :lanes] * _repeat(shrink, lanes) + weighted
        self.top[index] = top
        self.total[index] = self.total[index] * shrink + _sum_of_registers(weights)

    def result(self) -> jax.Array:
        """The weighted means; zeros for queries that saw nothing."""
        total = self.total[...].sum(axis=2, keepdims=True)
        return self.values[...] / jnp.where(total > 0.0, total, 1.0)


def _repeat(x: jax.Array, width: int) -> jax.Array:
    """`x [M, 128]`, the same in all lanes, with `width` of them."""
    return x[:, :width] if width <= _LANES else jnp.concatenate([x] * pl.cdiv(width, _LANES), axis=1)[:, :width]


def _sum_of_registers(x: jax.Array) -> jax.Array:
    """`[M, 128]`, whose sum over lanes is that of `x [M, N]`."""
    size = x.shape[1] // _LANES * _LANES
    parts = [x[:, first : first + _LANES] for first in range(0, size, _LANES)]
    if size < x.shape[1]:
        is_first = lax.broadcasted_iota(jnp.int32, (x.shape[0], _LANES), 1) == 0
        parts.append(jnp.where(is_first, x[:, size:].sum(axis=1, keepdims=True), 0.0))
    return sum(parts[1:], parts[0])


def _walk(
    rows: _Rows,
    pages: _Pages,
    parity: Any,
    visit: Callable[[Item, jax.Array], None],
    begin_row: Callable[[jax.Array], None],
    end_row: Callable[[jax.Array], None],
) -> None:
    """The loop of one query block over rows and their pages; `visit` computes while the next pages come."""
    block = pl.program_id(0) + rows.first_block

    @pl.when(pl.program_id(0) == 0)
    def begin() -> None:
        first = rows.first_item(block)
        zero = jnp.int32(0)
        parity[0] = zero
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

        @pl.when(rows.exists(following))
        def fetch() -> None:
            pages.wait_list(other)
            pages.start(following, other)

        @pl.when(rows.exists(after))
        def ask() -> None:
            pages.start_list(after, slot)

        pages.wait(item, slot)
        visit(item, slot)
        parity[0] = other

    def one_row(row: jax.Array, _: None) -> None:
        begin_row(row)
        lower, upper = rows.fetches(block, row)
        lax.fori_loop(lower, upper, lambda fetch, _: step((block, row, fetch)), None)
        end_row(row)

    lax.fori_loop(rows.first_row[block], rows.end_row[block], one_row, None)


def _parts(shape: _Shape, rows: _Rows, pages: _Pages, item: Item, slot: jax.Array, use: Callable[..., None]) -> None:
    """Call `use(part of the buffer, position of its first token, end)` for each part of a fetched block."""
    block, row, fetch = item
    begin, end = rows.visible(block, row)
    size, first = shape.compute_tokens, fetch * shape.fetch_tokens
    lower = jnp.maximum(begin - first, 0) // size
    upper = pl.cdiv(jnp.minimum(end - first, shape.fetch_tokens), size)

    def one(part: jax.Array, _: None) -> None:
        place = pl.multiple_of(part * size, size)
        tokens = pages.kv_buf.at[slot, pl.ds(place, size)]
        left = end - (first + place)

        @pl.when(left < size)
        def silence() -> None:
            # What no request wrote may be anything, and zero weight does not silence NaN.
            is_token = lax.broadcasted_iota(jnp.int32, tokens.shape, 0) < left
            tokens[...] = jnp.where(is_token, tokens[...], jnp.zeros(tokens.shape, tokens.dtype))

        use(tokens, first + place, end)

    lax.fori_loop(lower, upper, one, None)


def _increments_kernel(*refs: Any, shape: _Shape) -> None:
    """Rows with one query; each has `[bundles, M, lanes]` of its own, M = together * G."""
    rows, pages, (q, out, softmax, parity) = _unpack(refs, shape)
    begin_of_block = (pl.program_id(0) + rows.first_block) * shape.query_block

    def visit(item: Item, slot: jax.Array) -> None:
        row = item[1]
        queries = q.at[row - begin_of_block]

        def use(tokens: Any, first: jax.Array, end: jax.Array) -> None:
            position = first + lax.broadcasted_iota(jnp.int32, (queries.shape[1], shape.compute_tokens), 1)
            visible = position < end
            if shape.sliding_window is not None:
                visible &= position >= end - shape.sliding_window
            for index, (lane, heads) in enumerate(shape.bundles):
                k, v = shape.kv_lanes(lane, heads)
                lanes = k.stop - k.start
                softmax.add(index, queries[index, :, :lanes], tokens[:, k], tokens[:, v], visible)

        _parts(shape, rows, pages, item, slot, use)

    def finish(row: jax.Array) -> None:
        out[row - begin_of_block] = softmax.result().astype(out.dtype)

    _walk(rows, pages, parity, visit, lambda row: softmax.clear(), finish)


def _chunks_kernel(*refs: Any, shape: _Shape) -> None:
    """Rows with several queries; a block has `[K, M, lanes]`, M = query_block * G, queries of a token together."""
    rows, pages, (q, out, softmax, parity) = _unpack(refs, shape)
    begin_of_block = (pl.program_id(0) + rows.first_block) * shape.query_block
    softmax.clear()

    def visit(item: Item, slot: jax.Array) -> None:
        row = item[1]
        start, length = rows.start[row], rows.length[row]
        before = rows.context[row] - length

        def use(tokens: Any, first: jax.Array, _: jax.Array) -> None:
            first_query, last_key = begin_of_block - start, first + shape.compute_tokens - 1
            last_query = first_query + shape.query_block - 1
            is_whole = (first_query >= 0) & (last_query < length) & (last_key <= before + first_query)
            if shape.sliding_window is not None:
                is_whole &= first > before + last_query - shape.sliding_window

            def add(visible: jax.Array | None) -> None:
                for head in range(shape.num_kv_heads):
                    k, v = shape.kv_lanes(2 * shape.head_dim * head, 1)
                    softmax.add(head, q[head], tokens[:, k], tokens[:, v], visible)

            # Of a long prompt nearly all is seen whole, and masks would cost as much as the products.
            @pl.when(is_whole)
            def whole() -> None:
                add(None)

            @pl.when(jnp.logical_not(is_whole))
            def masked() -> None:
                size = (q.shape[1], shape.compute_tokens)
                index = first_query + lax.broadcasted_iota(jnp.int32, size, 0) // shape.groups
                key = first + lax.broadcasted_iota(jnp.int32, size, 1)
                visible = (index >= 0) & (index < length) & (key <= before + index)
                if shape.sliding_window is not None:
                    visible &= key > before + index - shape.sliding_window
                add(visible)

        _parts(shape, rows, pages, item, slot, use)

    def nothing(row: jax.Array) -> None:
        """A block's sums are kept for all its rows together."""

    _walk(rows, pages, parity, visit, nothing, nothing)
    out[...] = softmax.result().astype(out.dtype)


def _unpack(refs: tuple[Any, ...], shape: _Shape) -> tuple[_Rows, _Pages, tuple[Any, Any, _Softmax, Any]]:
    """The references of a kernel by their roles, in the order of `_call`."""
    scalars, (q, lists, kv, out), scratch = refs[:6], refs[6:10], refs[10:]
    parity, list_buf, kv_buf, list_sem, kv_sem, *sums = scratch
    rows = _Rows(shape, *scalars)
    pages = _Pages(shape, rows, lists, kv, list_buf, kv_buf, list_sem, kv_sem)
    return rows, pages, (q, out, _Softmax(shape, *sums), parity)


def _call(
    kernel: Callable[..., None],
    name: str,
    shape: _Shape,
    blocks: tuple[jax.Array, jax.Array, jax.Array],
    q: jax.Array,
    pages: PackedPages,
    rows: "_RowArrays",
    *,
    axis: int,
    out_dtype: jnp.dtype,
    interpret: Any,
) -> jax.Array:
    """Run a kernel over some query blocks; blocks of `q` and of the output are cut along `axis`.

    Args:
        blocks: first and last (exclusive) block; first row of each block; last row (exclusive) of each.
    """
    span, scalars = blocks[0], (*blocks, rows.start, rows.length, rows.context)
    block = list(q.shape)
    block[axis] = shape.query_block if axis == 0 else shape.query_block * shape.groups
    index = [0] * q.ndim

    def place(step: jax.Array, span: Any, *_: Any) -> tuple[Any, ...]:
        return (*index[:axis], step + span[0], *index[axis + 1 :])

    spec = pl.BlockSpec(tuple(block), place)
    sums = tuple(block[1:]) if axis == 0 else tuple(block)
    width = pages.kv.shape[2]
    scratch = [
        pltpu.SMEM((1,), jnp.int32),
        pltpu.SMEM((2, 1, _LANES), jnp.int32),
        pltpu.VMEM((2, shape.fetch_tokens, width), pages.kv.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.VMEM((*sums[:2], _LANES), jnp.float32),
        pltpu.VMEM((*sums[:2], _LANES), jnp.float32),
        pltpu.VMEM(sums, jnp.float32),
    ]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    run = pl.pallas_call(
        partial(kernel, shape=shape),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(span[1] - span[0],),
            in_specs=[spec, anywhere, anywhere],
            out_specs=spec,
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, out_dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=_VMEM_LIMIT),
        name=name,
        interpret=interpret,
    )
    result: jax.Array = run(*scalars, q, rows.lists, pages.kv)
    return result


def ragged_attention_tpu(
    q: Float[Array, "T H D"],
    pages: KVPages,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> Float[Array, "T H D"]:
    """See `ragged_attention`.

    Args:
        blocks: sizes, to try others than the table's.
        interpret: as `pallas_call` takes it, to run without a TPU.

    Raises:
        NotImplementedError: the pages are not packed, or are quantised.
    """
    reason = refusal(pages)
    if reason is not None:
        raise NotImplementedError(reason)
    assert isinstance(pages, PackedPages), "the only layout that is not refused"
    is_exact = q.dtype == jnp.float32 and pages.dtype == jnp.float32
    dtype = jnp.float32 if is_exact else jnp.bfloat16
    blocks = blocks or choose_blocks(_heads(q, pages))
    shape = _Shape(
        num_kv_heads=num_kv_heads(pages, q.shape[2]),
        groups=q.shape[1] // num_kv_heads(pages, q.shape[2]),
        head_dim=q.shape[2],
        page_size=pages.page_size,
        query_block=blocks.increment_rows,
        fetch_pages=blocks.fetch_pages,
        compute_pages=blocks.compute_pages,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        compute_dtype=dtype,
    )
    rows = _RowArrays(_page_lists(page_table), query_start, query_len, context_len)
    # Weights are powers of two, which spares a product for each score.
    factor = scale if soft_cap is not None else scale * _LOG2E
    scaled = (q.astype(jnp.float32) * factor).astype(dtype)
    options: dict[str, Any] = {"out_dtype": q.dtype, "interpret": interpret}
    out = _attend_increments(shape, scaled, pages, rows, **options)
    token = jnp.arange(q.shape[0])[:, None, None]
    if q.shape[0] > 1:
        query_block = min(blocks.query_block, pl.cdiv(q.shape[0], 16) * 16)
        of_chunks = replace(shape, query_block=query_block, compute_pages=blocks.chunk_pages)
        chunks = _attend_chunks(of_chunks, scaled, pages, rows, **options)
        out = jnp.where(token < rows.num_increments, out, chunks)
    # Blocks without a request are not visited, and what stands there may be anything.
    return jnp.where(token < query_len.sum(), out, jnp.zeros_like(out))


def refusal(pages: KVPages) -> str | None:
    """Why the kernels cannot read such pages; None where they can."""
    if not isinstance(pages, PackedPages):
        return "attention 'tpu' reads packed pages only"
    if pages.is_quantised:
        return "attention 'tpu' reads float32 and bfloat16 pages; 'xla' reads quantised ones"
    least = _SUBLANES * 4 // pages.dtype.itemsize
    if pages.page_size % least:
        return f"attention 'tpu' needs a page_size that is a multiple of {least}, not {pages.page_size}"
    return None


class _RowArrays(NamedTuple):
    """The requests: their page table in lines of 128, and the scalars that kernels keep in scalar memory."""

    lists: Int[Array, "L 1 128"]
    start: Int[Array, " R"]
    length: Int[Array, " R"]
    context: Int[Array, " R"]

    @property
    def num_increments(self) -> Int[Array, ""]:
        """Rows with one query, which come first."""
        return jnp.sum(self.length == 1, dtype=jnp.int32)


def _attend_increments(
    shape: _Shape, q: Float[Array, "T H D"], pages: PackedPages, rows: _RowArrays, **options: Any
) -> Float[Array, "T H D"]:
    """Outputs of the first tokens, which are those of the rows with one query."""
    most = min(q.shape[0], rows.start.shape[0])
    queries = _pad(_bundle(shape, q[:most]), 0, shape.query_block)
    blocks = _increment_blocks(shape, most, rows.num_increments)
    out = _call(_increments_kernel, "increments", shape, blocks, queries, pages, rows, axis=0, **options)
    return jnp.pad(_unbundle(shape, out)[:most], ((0, q.shape[0] - most), (0, 0), (0, 0)))


def _attend_chunks(
    shape: _Shape, q: Float[Array, "T H D"], pages: PackedPages, rows: _RowArrays, **options: Any
) -> Float[Array, "T H D"]:
    """Outputs of the tokens of rows with several queries."""
    queries = _pad(_by_head(shape, q), 1, shape.query_block * shape.groups)
    blocks = _chunk_blocks(shape, q.shape[0], rows)
    out = _call(_chunks_kernel, "chunks", shape, blocks, queries, pages, rows, axis=1, **options)
    return _by_token(shape, out)[: q.shape[0]]


def _heads(q: Array, pages: PackedPages) -> Heads:
    """What block sizes depend on; a program that is compiled for another machine's TPU gets the rule's."""
    device = jax.devices()[0].device_kind if jax.default_backend() == "tpu" else ""
    kv_heads = num_kv_heads(pages, q.shape[2])
    return Heads(device, kv_heads, q.shape[1] // kv_heads, q.shape[2], pages.page_size, pages.dtype.itemsize)


def _page_lists(page_table: Int[Array, "R P"]) -> Int[Array, "L 1 128"]:
    """The page table, a row in lines of 128 pages."""
    rows, width = page_table.shape
    padded = jnp.pad(page_table, ((0, 0), (0, -width % _LANES)))
    return padded.reshape(rows * (padded.shape[1] // _LANES), 1, _LANES)


def _increment_blocks(shape: _Shape, most: int, count: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Blocks `0 : end`, and first and last row of each: row r has token r."""
    first = shape.query_block * jnp.arange(pl.cdiv(most, shape.query_block), dtype=jnp.int32)
    span = jnp.stack([jnp.zeros_like(count), pl.cdiv(count, shape.query_block)])
    return span, first, jnp.minimum(first + shape.query_block, count)


def _chunk_blocks(shape: _Shape, num_tokens: int, rows: _RowArrays) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Blocks from the first chunk's first token on, and the first and last row of each that is a chunk."""
    size, increments = shape.query_block, rows.num_increments
    begin = size * jnp.arange(pl.cdiv(num_tokens, size), dtype=jnp.int32)[:, None]
    end, is_chunk = rows.start + rows.length, rows.length > 1
    first = increments + jnp.sum(is_chunk & (end <= begin), axis=1, dtype=jnp.int32)
    last = increments + jnp.sum(is_chunk & (rows.start < begin + size), axis=1, dtype=jnp.int32)
    total = jnp.sum(rows.length, dtype=jnp.int32)
    lower = increments // size
    upper = jnp.where(total > increments, pl.cdiv(total, size), lower)
    return jnp.stack([lower, upper]), first, last


def _bundle(shape: _Shape, q: Float[Array, "T H D"]) -> Float[Array, "T B M X"]:
    """Queries of increments: those of a KV head in the lanes of its keys, zeros in all other lanes of the bundle."""
    n, missing = shape.together, -shape.num_kv_heads % shape.together
    by_head = q.reshape(q.shape[0], shape.num_kv_heads, shape.groups, shape.head_dim)
    by_head = jnp.pad(by_head, ((0, 0), (0, missing), (0, 0), (0, shape.lanes - shape.head_dim)))
    bundles = by_head.reshape(q.shape[0], -1, n, shape.groups, 1, shape.lanes)
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    spread = jnp.where(own, bundles, jnp.zeros_like(bundles))
    return spread.reshape(q.shape[0], bundles.shape[1], n * shape.groups, n * shape.lanes)


def _unbundle(shape: _Shape, out: Float[Array, "T B M X"]) -> Float[Array, "T H D"]:
    """Outputs of increments: for each head the values of its own KV head."""
    n = shape.together
    split = out.reshape(*out.shape[:2], n, shape.groups, n, shape.lanes)
    own = jnp.eye(n, dtype=bool)[:, None, :, None]
    # Not a product with 0 and 1: lanes past the last bundle's heads were never computed.
    values = jnp.where(own, split, jnp.zeros_like(split)).sum(axis=4)[..., -shape.head_dim :]
    heads = values.reshape(out.shape[0], -1, shape.groups, shape.head_dim)[:, : shape.num_kv_heads]
    return heads.reshape(out.shape[0], -1, shape.head_dim)


def _by_head(shape: _Shape, q: Float[Array, "T H D"]) -> Float[Array, "K TG X"]:
    """Queries of chunks, the G of a token side by side."""
    split = q.reshape(q.shape[0], shape.num_kv_heads, shape.groups, shape.head_dim).transpose(1, 0, 2, 3)
    padded = jnp.pad(split, ((0, 0), (0, 0), (0, 0), (0, shape.lanes - shape.head_dim)))
    return padded.reshape(shape.num_kv_heads, -1, shape.lanes)


def _by_token(shape: _Shape, out: Float[Array, "K TG X"]) -> Float[Array, "T H D"]:
    """Outputs of chunks."""
    split = out[..., -shape.head_dim :].reshape(shape.num_kv_heads, -1, shape.groups, shape.head_dim)
    return split.transpose(1, 0, 2, 3).reshape(split.shape[1], -1, shape.head_dim)


def _pad(x: Array, axis: int, multiple: int) -> Array:
    """`x` with zeros behind it along an axis, up to a multiple."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % multiple)
    return jnp.pad(x, widths)
