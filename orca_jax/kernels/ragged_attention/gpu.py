"""Ragged paged attention for Hopper, in Mosaic GPU: pages by TMA, products by wgmma.

A page is packed (`kernels/kv_pages.py`), so K and V of one head are two column ranges of its rows, and TMA
fetches each as a box of its own:

             head 0      head 1              head K-1
    slot 0  [K D][V D]  [K D][V D]   ...   [K D][V D]
    slot 1  [K D][V D]  [K D][V D]   ...   [K D][V D]          q box   [rows, D]
      ...                                                      K box   [block, D]   1 page, part of one, or several
    slot S-1                                                   V box   [block, D]

One call is three kernels, because increments are bound by memory and chunks by arithmetic:

1. `_increments`, one thread block for each multiprocessor. A context is cut into pieces of equal length,
   short enough that pieces * K items keep every thread block busy even for a single request, and few enough that
   their partial results stay small. A thread block owns the items `id, id + grid, ...`: for each of them a producer
   warpgroup fetches blocks of 64 or 128 tokens, and a consumer warpgroup multiplies them with the G query heads that
   share K and V. wgmma has 64 rows and G fills only some of them; tensor cores are idle here anyway, and padding
   costs neither memory traffic nor time. Neighbouring items are heads of the same pages, so DRAM rows are read whole.
2. `_combine`, grid of requests: weighs the pieces of a request by their log-sum-exp. Its loop owns one request's
   pieces and 64 rows of (head, group).
3. `_chunks`, one thread block for each multiprocessor, over items (tile of up to 128 consecutive queries of one
   request, query head), tiles with the longest contexts first so that the last ones are short. Two consumer
   warpgroups own 64 queries each and take turns: one computes its softmax while the other has the tensor cores.
   Blocks that every query sees skip the mask.

In all loops a block goes through `stages` places in shared memory; four barriers for each place say that K or V is
there, or may be overwritten. Where an item ends the producer goes on with the next one's blocks. Sums, maxima and
accumulators are float32 in registers. Slots that no request wrote may hold NaN: their scores are masked, and
their V is overwritten by zeros in shared memory, which only the last block of a context needs.

wgmma is Hopper's own. What `refusal` names, and other GPUs, are for other implementations.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages, PackedPages, num_kv_heads
from orca_jax.kernels.ragged_attention import gpu_plan
from orca_jax.kernels.ragged_attention.gpu_plan import Pieces, Tiles, cut_contexts, cut_queries

_ROWS = gpu_plan.ROWS
_MASKED = -1e30  # finite: a fully masked block must not make NaN out of inf - inf
_LOG2E = math.log2(math.e)
HEAD_DIMS = tuple(gpu_plan.INCREMENT_BLOCKS)
PAGE_SIZES = (16, 32, 64, 128, 256)
_CONSUMERS = gpu_plan.TILE // _ROWS  # of chunks

Ref = Any  # Pallas has no public type for references


@dataclass(frozen=True)
class _Shape:
    """What both attention kernels have in common; all static.

    Attributes:
        head_dim, num_kv_heads, page_size: D, K and S.
        groups: G, query heads that share one KV head.
        block: tokens that are fetched and multiplied together.
        stages: blocks in shared memory at once.
        scale: factor on scores.
        sliding_window: tokens that a query sees, or None.
        soft_cap: bound on scores, or None.
        interpret: how to simulate the kernel, None to compile it.
    """

    head_dim: int
    num_kv_heads: int
    groups: int
    page_size: int
    block: int
    stages: int
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    interpret: Any

    @property
    def pages_per_block(self) -> int:
        """Copies for K of one block, and as many for V."""
        return max(1, self.block // self.page_size)

    def smem(self, *shape: int) -> Any:
        """Shared memory of bf16 as wgmma and TMA want it."""
        transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)  # type: ignore[abstract]
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


class _Places(NamedTuple):
    """The places in shared memory that K and V go through, and what says when."""

    k: Ref  # [stages, block, D]
    v: Ref
    k_there: Ref  # barriers, one for each stage
    v_there: Ref
    k_free: Ref
    v_free: Ref
    q_there: Ref  # one for each consumer
    q_free: Ref


def _places(shape: _Shape, consumers: int) -> list[Any]:
    """Scratch for `_Places`, in its order."""
    copies = plgpu.Barrier(num_arrivals=shape.pages_per_block, num_barriers=shape.stages)
    freed = plgpu.Barrier(num_arrivals=consumers, num_barriers=shape.stages)
    buffer = shape.smem(shape.stages, shape.block, shape.head_dim)
    q_there = plgpu.Barrier(num_barriers=consumers)
    return [buffer, buffer, copies, copies, freed, freed, q_there, plgpu.Barrier(num_arrivals=consumers)]


def _produce(
    shape: _Shape,
    places: _Places,
    pages: tuple[Ref, Ref],
    item: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    fetch_q: Callable[[], None],
    is_first: jax.Array,
    step: jax.Array,
) -> jax.Array:
    """Fetch the blocks of one item, and its queries among them.

    Args:
        shape: of the kernel.
        places: where blocks go.
        pages: K/V pages and the page table.
        item: row, KV head, first token (a multiple of `block`) and end.
        fetch_q: starts the copy of the queries.
        is_first: whether no item came before, so that nobody reads other queries.
        step: blocks that this thread block has fetched before.

    Returns:
        `step` after this item.
    """
    kv, table = pages
    row, head, first, end = item
    count = lax.div(end - first + (shape.block - 1), shape.block)
    last_page = lax.div(end - 1, shape.page_size)
    # Queries are awaited last of all: their place is free only when the item before has ended.
    with_q = jnp.minimum(count, shape.stages - 1) - 1

    def fetch(index: jax.Array, step: jax.Array) -> jax.Array:
        slot = lax.rem(step, shape.stages)
        token = first + index * shape.block
        page = lax.div(token, shape.page_size)
        offset: jax.Array | int = 0
        if shape.page_size > shape.block:
            offset = pl.multiple_of(lax.rem(token, shape.page_size), shape.block)
        # Past the context there may be no page: the last one is fetched again, and masked.
        ids = [table[row, jnp.minimum(page + i, last_page)] for i in range(shape.pages_per_block)]
        for part, (buffer, there, free) in enumerate(
            ((places.k, places.k_there, places.k_free), (places.v, places.v_there, places.v_free))
        ):

            @pl.when(step >= shape.stages)
            def _wait(free: Ref = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            column = pl.multiple_of((2 * head + part) * shape.head_dim, 16)
            size = min(shape.block, shape.page_size)
            for i, page_id in enumerate(ids):
                box = kv.at[page_id, pl.ds(offset, size), pl.ds(column, shape.head_dim)]
                plgpu.copy_gmem_to_smem(box, buffer.at[slot, pl.ds(i * size, size)], there.at[slot])

        @pl.when(index == with_q)
        def _queries() -> None:
            @pl.when(jnp.logical_not(is_first))
            def _wait() -> None:
                plgpu.barrier_wait(places.q_free)

            fetch_q()

        return step + 1

    return lax.fori_loop(0, count, fetch, step)


class _Softmax(NamedTuple):
    """Online softmax of 64 rows, in registers: running maximum (of scores in bits), denominator, weighted values."""

    top: Float[Array, " 64"]
    denominator: Float[Array, " 64"]
    values: Float[Array, "64 D"]


def _empty_softmax(shape: _Shape) -> _Softmax:
    return _Softmax(_full(_MASKED, _ROWS), _full(0.0, _ROWS), _full(0.0, _ROWS, shape.head_dim))


def _full(value: float, *size: int) -> jax.Array:
    """A constant in the registers of a wgmma's result, or one number for each of its rows."""
    layout = plgpu.Layout.WGMMA if len(size) == 2 else plgpu.Layout.WGMMA.reduce(1)
    constant: jax.Array = plgpu.layout_cast(jnp.full(size, value, jnp.float32), layout)
    return constant


def _across(rows: Float[Array, " 64"], like: jax.Array) -> jax.Array:
    """A number for each row, in every column."""
    return lax.broadcast_in_dim(rows, like.shape, [0])


def _scores(shape: _Shape, q: Ref, k: Ref) -> Float[Array, "64 C"]:
    """Scores in bits (base 2 logarithms), so that `exp2` is all that is left to do."""

    def multiply(accumulator: Ref) -> jax.Array:
        plgpu.wgmma(accumulator, q, k.transpose((1, 0)))
        return accumulator[...]

    scores: jax.Array = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((_ROWS, shape.block), jnp.float32))
    if shape.soft_cap is None:
        return scores * (shape.scale * _LOG2E)
    return jnp.tanh(scores * (shape.scale / shape.soft_cap)) * (shape.soft_cap * _LOG2E)


def _weighted(shape: _Shape, weights: Float[Array, "64 C"], v: Ref) -> Float[Array, "64 D"]:
    """`weights @ v`."""
    if shape.interpret is not None:  # the simulator has no wgmma with a factor in registers
        return jnp.dot(weights, v[...], preferred_element_type=jnp.float32)

    def multiply(accumulator: Ref) -> jax.Array:
        plgpu.wgmma(accumulator, weights, v)
        return accumulator[...]

    result: jax.Array = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((_ROWS, shape.head_dim), jnp.float32))
    return result


def _iota(shape: _Shape, axis: int) -> Int[Array, "64 C"]:
    return plgpu.broadcasted_iota(jnp.int32, (_ROWS, shape.block), axis, layout=plgpu.Layout.WGMMA)


def _add_weights(state: _Softmax, scores: Float[Array, "64 C"]) -> tuple[_Softmax, Float[Array, "64 C"]]:
    """The state with a block's weights in its denominator and its values shrunk; and the weights in bf16."""
    top = jnp.maximum(state.top, scores.max(axis=1))
    weights = jnp.exp2(scores - _across(top, scores))
    shrink = jnp.exp2(state.top - top)
    denominator = state.denominator * shrink + weights.sum(axis=1)
    state = _Softmax(top, denominator, state.values * _across(shrink, state.values))
    return state, weights.astype(jnp.bfloat16)


def _silence(shape: _Shape, v: Ref, written: jax.Array) -> None:
    """Overwrite the V of slots that nobody wrote by zeros: a weight of zero does not silence NaN."""
    for start in range(0, shape.block, _ROWS):
        place = v.at[pl.ds(start, _ROWS)]
        tokens = plgpu.broadcasted_iota(jnp.int32, (_ROWS, shape.head_dim), 0, layout=plgpu.Layout.WGMMA)
        values = plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False)
        place[...] = jnp.where(tokens + start < written, values, jnp.zeros_like(values))
    plgpu.commit_smem()


@dataclass(frozen=True)
class _IncrementBlock:
    """A thread block of `_increments`: references to all that it works on, and what its two warpgroups do."""

    shape: _Shape
    grid: int
    places: _Places
    q: Ref  # [R, K, G, D], G padded to 8
    kv: Ref
    table: Ref
    fields: Ref
    total: Ref
    out: Ref
    lse: Ref
    q_smem: Ref
    out_smem: Ref
    lse_smem: Ref

    def run(self) -> None:
        """The whole life of the thread block."""
        items = self.total[0] * self.shape.num_kv_heads - lax.axis_index("block")
        count = lax.div(items + (self.grid - 1), self.grid)

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _consumer() -> None:
            lax.fori_loop(0, count, self.consume, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _producer() -> None:
            lax.fori_loop(0, count, self.produce, jnp.int32(0))

    def item(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Piece and KV head."""
        item = lax.axis_index("block") + index * self.grid
        return lax.div(item, self.shape.num_kv_heads), lax.rem(item, self.shape.num_kv_heads)

    def produce(self, index: jax.Array, step: jax.Array) -> jax.Array:
        """Fetch an item, after `step` blocks before it."""
        piece, head = self.item(index)
        row, first, end = (self.fields[i, piece] for i in range(3))

        def fetch_q() -> None:
            place = self.q_smem.at[pl.ds(0, self.q.shape[2])]
            plgpu.copy_gmem_to_smem(self.q.at[row, head], place, self.places.q_there.at[0])

        pages = self.kv, self.table
        return _produce(self.shape, self.places, pages, (row, head, first, end), fetch_q, index == 0, step)

    def consume(self, index: jax.Array, step: jax.Array) -> jax.Array:
        """Multiply an item."""
        piece, head = self.item(index)
        first, end, low = (self.fields[i, piece] for i in range(1, 4))
        plgpu.barrier_wait(self.places.q_there.at[0])

        def block(i: jax.Array, state: _Softmax) -> _Softmax:
            return self.multiply(lax.rem(step + i, self.shape.stages), first + i * self.shape.block, end, low, state)

        num_blocks = lax.div(end - first + (self.shape.block - 1), self.shape.block)
        state = lax.fori_loop(0, num_blocks, block, _empty_softmax(self.shape))
        plgpu.barrier_arrive(self.places.q_free)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before is on its way
        self.out_smem[...] = state.values / _across(state.denominator, state.values)
        self.lse_smem[...] = state.top + jnp.log2(state.denominator)
        plgpu.commit_smem()
        padded = self.q.shape[2]
        mine = pl.ds(pl.multiple_of(head * padded, 8), padded)
        plgpu.copy_smem_to_gmem(self.out_smem.at[pl.ds(0, padded)], self.out.at[piece, mine])
        plgpu.copy_smem_to_gmem(self.lse_smem.at[pl.ds(0, padded)], self.lse.at[piece, mine])
        return step + num_blocks

    def multiply(self, slot: jax.Array, token: jax.Array, end: jax.Array, low: jax.Array, state: _Softmax) -> _Softmax:
        """One block, whose first token is `token`; the query sees `low <= token < end`."""
        shape, places = self.shape, self.places
        plgpu.barrier_wait(places.k_there.at[slot])
        scores = _scores(shape, self.q_smem, places.k.at[slot])
        plgpu.barrier_arrive(places.k_free.at[slot])
        position = token + _iota(shape, 1)
        visible = position < end
        if shape.sliding_window is not None:
            visible = visible & (position >= low)
        state, weights = _add_weights(state, jnp.where(visible, scores, _MASKED))
        v = places.v.at[slot]
        plgpu.barrier_wait(places.v_there.at[slot])
        pl.when(token + shape.block > end)(lambda: _silence(shape, v, end - token))
        state = state._replace(values=state.values + _weighted(shape, weights, v))
        plgpu.barrier_arrive(places.v_free.at[slot])
        return state


def _increments(
    shape: _Shape,
    q: Float[Array, "R K G D"],
    kv: Float[Array, "N S W"],
    page_table: Int[Array, "R P"],
    pieces: Pieces,
    *,
    grid: int,
) -> tuple[Float[Array, "I M D"], Float[Array, "I M"]]:
    """Attention of each piece of each increment: normalised values and log-sum-exp in bits, `M >= K * G`."""

    def increments(*refs: Ref) -> None:
        _IncrementBlock(shape, grid, _Places(*refs[10:]), *refs[:10]).run()

    num_pieces, rows = pieces.fields.shape[1], pl.cdiv(shape.num_kv_heads * q.shape[2], _ROWS) * _ROWS
    results = (
        jax.ShapeDtypeStruct((num_pieces, rows, shape.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_pieces, rows), jnp.float32),
    )
    scratch = [
        shape.smem(_ROWS, shape.head_dim),
        plgpu.SMEM((_ROWS, shape.head_dim), jnp.float32),
        plgpu.SMEM((_ROWS,), jnp.float32),
        *_places(shape, consumers=1),
    ]
    launch = _launch(increments, results, scratch, {"block": grid}, 2, shape.interpret)
    out, lse = launch(q, kv, page_table, pieces.fields, pieces.total)
    return out, lse


def _combine(
    shape: _Shape, out: Float[Array, "I M D"], lse: Float[Array, "I M"], pieces: Pieces
) -> Float[Array, "R M D"]:
    """The pieces of each request together, in bf16; rows without pieces stay as they are in memory."""
    rows = pieces.begin.shape[0]

    def combine(out_ref: Ref, lse_ref: Ref, begin: Ref, count: Ref, result: Ref, smem: Ref) -> None:
        row = lax.axis_index("row")
        mine = pl.ds(pl.multiple_of(lax.axis_index("heads") * _ROWS, _ROWS), _ROWS)
        first, number = begin[row], count[row]

        def add(index: jax.Array, state: _Softmax) -> _Softmax:
            piece = first + index
            mass = plgpu.load(lse_ref.at[piece, mine], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            values = plgpu.load(out_ref.at[piece, mine], layout=plgpu.Layout.WGMMA, optimized=False)
            top = jnp.maximum(state.top, mass)
            shrink, weight = jnp.exp2(state.top - top), jnp.exp2(mass - top)
            values = state.values * _across(shrink, values) + values * _across(weight, values)
            return _Softmax(top, state.denominator * shrink + weight, values)

        @pl.when(number > 0)
        def _any() -> None:
            state = lax.fori_loop(0, number, add, _empty_softmax(shape))
            smem[...] = (state.values / _across(state.denominator, state.values)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, result.at[row, mine])
            plgpu.wait_smem_to_gmem(0)

    results = (jax.ShapeDtypeStruct((rows, *out.shape[1:]), jnp.bfloat16),)
    grid = {"row": rows, "heads": out.shape[1] // _ROWS}
    scratch = [plgpu.SMEM((_ROWS, shape.head_dim), jnp.bfloat16)]
    launch = _launch(combine, results, scratch, grid, 1, shape.interpret)
    return launch(out, lse, pieces.begin, pieces.number)[0]


@dataclass(frozen=True)
class _ChunkBlock:
    """A thread block of `_chunks`: references to all that it works on, and what its three warpgroups do."""

    shape: _Shape
    grid: int
    places: _Places
    q: Ref  # [T, H, D]
    kv: Ref
    table: Ref
    fields: Ref
    total: Ref
    out: Ref
    q_raw: Ref  # as TMA brings it
    q_smem: Ref  # as wgmma wants it
    out_smem: Ref
    turn: Ref

    def run(self) -> None:
        """The whole life of the thread block."""
        items = self.total[0] * self.q.shape[1] - lax.axis_index("block")
        count = lax.div(items + (self.grid - 1), self.grid)

        @pl.when(lax.axis_index("warpgroup") < _CONSUMERS)
        def _consumer() -> None:
            plgpu.set_max_registers(232, action="increase")
            lax.fori_loop(0, count, self.consume, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("warpgroup") == _CONSUMERS)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")
            lax.fori_loop(0, count, self.produce, jnp.int32(0))

    def item(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tile, the last of all first, and query head."""
        item, num_heads = lax.axis_index("block") + index * self.grid, self.q.shape[1]
        return self.total[0] - 1 - lax.div(item, num_heads), lax.rem(item, num_heads)

    def take_turns(self) -> None:
        """Until the other consumer comes here too."""
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)

    def produce(self, index: jax.Array, step: jax.Array) -> jax.Array:
        """Fetch an item, after `step` blocks before it."""
        tile, head = self.item(index)
        row, query, number, position, first = (self.fields[i, tile] for i in range(5))

        def fetch_q() -> None:
            for i in range(_CONSUMERS):
                box = self.q.at[pl.ds(query + i * _ROWS, _ROWS), head]
                plgpu.copy_gmem_to_smem(box, self.q_raw.at[pl.ds(i * _ROWS, _ROWS)], self.places.q_there.at[i])

        item = row, lax.div(head, self.shape.groups), first, position + number
        return _produce(self.shape, self.places, (self.kv, self.table), item, fetch_q, index == 0, step)

    def consume(self, index: jax.Array, step: jax.Array) -> jax.Array:
        """Multiply the 64 queries of an item that this warpgroup owns."""
        shape, mine = self.shape, lax.axis_index("warpgroup")
        tile, head = self.item(index)
        query, number, position, first, context = (self.fields[i, tile] for i in range(1, 6))
        num_blocks = lax.div(position + number - first + (shape.block - 1), shape.block)
        own_first = position + mine * _ROWS
        self.arrange_queries()

        def block(i: jax.Array, state: _Softmax, *, is_masked: bool) -> _Softmax:
            slot, token = lax.rem(step + i, shape.stages), first + i * shape.block
            return self.multiply(slot, token, own_first, context if is_masked else None, state)

        # Blocks that end before the first query have nothing to mask, if all of their slots are written.
        known = jnp.minimum(own_first + 1, context)
        open_blocks = lax.div(known - first, shape.block) if shape.sliding_window is None else jnp.int32(0)
        open_blocks = jnp.minimum(open_blocks, num_blocks)
        pl.when(mine == 1)(self.take_turns)
        state = _empty_softmax(shape)
        state = lax.fori_loop(0, open_blocks, partial(block, is_masked=False), state)
        state = lax.fori_loop(open_blocks, num_blocks, partial(block, is_masked=True), state)
        pl.when(mine == 0)(self.take_turns)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before is on its way
        own_out = self.out_smem.at[pl.ds(mine * _ROWS, _ROWS)]
        own_out[...] = (state.values / _across(state.denominator, state.values)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        _write_tile(own_out, self.out, head, query + mine * _ROWS, number - mine * _ROWS)
        return step + num_blocks

    def arrange_queries(self) -> None:
        """TMA writes wgmma's layout only from rows that are multiples of 8, and a request may begin anywhere."""
        mine = lax.axis_index("warpgroup")
        own = pl.ds(mine * _ROWS, _ROWS)
        plgpu.barrier_wait(self.places.q_there.at[mine])
        place = self.q_smem.at[own]
        place[...] = plgpu.load(self.q_raw.at[own], layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.places.q_free)

    def multiply(
        self, slot: jax.Array, token: jax.Array, own_first: jax.Array, context: jax.Array | None, state: _Softmax
    ) -> _Softmax:
        """One block, whose first token is `token`, by queries from `own_first`; with `context`, it is masked."""
        shape, places, mine = self.shape, self.places, lax.axis_index("warpgroup")
        v = places.v.at[slot]
        plgpu.barrier_wait(places.k_there.at[slot])
        scores = _scores(shape, self.q_smem.at[pl.ds(mine * _ROWS, _ROWS)], places.k.at[slot])
        self.take_turns()
        plgpu.barrier_arrive(places.k_free.at[slot])
        if context is not None:
            ahead = (own_first - token) + _iota(shape, 0) - _iota(shape, 1)  # of the key
            visible = ahead >= 0
            if shape.sliding_window is not None:
                visible = visible & (ahead < shape.sliding_window)
            scores = jnp.where(visible, scores, _MASKED)
        state, weights = _add_weights(state, scores)
        plgpu.barrier_wait(places.v_there.at[slot])
        if context is not None:
            # The first consumer is a turn ahead of the second, which therefore finds zeros.
            is_mine = (mine == 0) & (token + shape.block > context)
            pl.when(is_mine)(lambda: _silence(shape, v, context - token))
        self.take_turns()
        state = state._replace(values=state.values + _weighted(shape, weights, v))
        plgpu.barrier_arrive(places.v_free.at[slot])
        return state


def _chunks(
    shape: _Shape,
    q: Float[Array, "T H D"],
    kv: Float[Array, "N S W"],
    page_table: Int[Array, "R P"],
    tiles: Tiles,
    *,
    grid: int,
) -> Float[Array, "T H D"]:
    """Attention of all tiles; other tokens' output stays as it is in memory."""

    def chunks(*refs: Ref) -> None:
        _ChunkBlock(shape, grid, _Places(*refs[10:]), *refs[:10]).run()

    scratch = [
        plgpu.SMEM((gpu_plan.TILE, shape.head_dim), jnp.bfloat16),
        shape.smem(gpu_plan.TILE, shape.head_dim),
        plgpu.SMEM((gpu_plan.TILE, shape.head_dim), jnp.bfloat16),
        plgpu.Barrier(num_arrivals=_CONSUMERS),
        *_places(shape, _CONSUMERS),
    ]
    results = (jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),)
    launch = _launch(chunks, results, scratch, {"block": grid}, _CONSUMERS + 1, shape.interpret)
    return launch(q, kv, page_table, tiles.fields, tiles.total)[0]


def _write_tile(smem: Ref, out: Ref, head: jax.Array, first: jax.Array, number: jax.Array) -> None:
    """Copy up to 64 rows: at once if the tile is full, else row by row, since what follows belongs to others."""

    @pl.when(number >= _ROWS)
    def _whole() -> None:
        plgpu.copy_smem_to_gmem(smem, out.at[pl.ds(first, _ROWS), head])

    @pl.when(number < _ROWS)
    def _part() -> None:
        def copy(row: jax.Array, _: None) -> None:
            plgpu.copy_smem_to_gmem(smem.at[pl.ds(row, 1)], out.at[pl.ds(first + row, 1), head])

        lax.fori_loop(0, jnp.minimum(number, _ROWS), copy, None)


def _launch(
    kernel: Callable[..., None],
    results: tuple[jax.ShapeDtypeStruct, ...],
    scratch: list[Any],
    grid: dict[str, int],
    warpgroups: int,
    interpret: Any,
) -> Callable[..., tuple[jax.Array, ...]]:
    launch: Callable[..., tuple[jax.Array, ...]] = plgpu.kernel(
        kernel,
        out_type=results,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=1024),
        interpret=interpret,
    )
    return launch


@partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "multiprocessors", "interpret"))
def ragged_attention_gpu(
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
    multiprocessors: int = 132,
    interpret: Any = None,
) -> Float[Array, "T H D"]:
    """See `ragged_attention`.

    Args:
        multiprocessors: how many the device has; another number costs speed and nothing else. H100 and H200 have 132.
        interpret: as `plgpu.kernel` takes it, to run without a GPU.

    Raises:
        NotImplementedError: what `refusal` says.
    """
    if (reason := refusal(q, pages)) or not isinstance(pages, PackedPages):
        raise NotImplementedError(reason)
    dtype, q = q.dtype, q.astype(jnp.bfloat16)
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = num_kv_heads(pages, head_dim)
    shape = _Shape(
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        groups=num_heads // kv_heads,
        page_size=pages.page_size,
        **gpu_plan.INCREMENT_BLOCKS[head_dim]._asdict(),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    rows = min(num_tokens, page_table.shape[0])  # increments are the first rows, and their queries the first tokens
    out = _attend_increments(
        shape, q[:rows], pages.kv, page_table, query_len[:rows], context_len[:rows], multiprocessors
    )
    token = jnp.arange(num_tokens)[:, None, None]
    out = jnp.pad(out, ((0, num_tokens - rows), (0, 0), (0, 0)))
    if num_tokens > 1:
        chunk_shape = replace(shape, **gpu_plan.CHUNK_BLOCKS._asdict())
        cut = partial(cut_queries, size=gpu_plan.TILE, block=chunk_shape.block, sliding_window=sliding_window)
        tiles = cut(query_start, query_len, context_len, num_tokens=num_tokens)
        padded = jnp.pad(q, ((0, max(0, _ROWS - num_tokens)), (0, 0), (0, 0)))  # TMA fetches 64 rows at once
        chunks = _chunks(chunk_shape, padded, pages.kv, page_table, tiles, grid=multiprocessors)
        out = jnp.where(token < jnp.sum(query_len == 1), out, chunks[:num_tokens])
    return jnp.where(token < query_len.sum(), out, jnp.zeros_like(out)).astype(dtype)


def _attend_increments(
    shape: _Shape,
    q: Float[Array, "R H D"],
    kv: Float[Array, "N S W"],
    page_table: Int[Array, "R P"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    multiprocessors: int,
) -> Float[Array, "R H D"]:
    """Rows that are increments; others' output stays as it is in memory."""
    rows, num_heads, head_dim = q.shape
    padded = pl.cdiv(shape.groups, 8) * 8
    grouped = q.reshape(rows, shape.num_kv_heads, shape.groups, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padded - shape.groups), (0, 0)))
    pieces = cut_contexts(
        query_len,
        context_len,
        num_pieces=gpu_plan.most_pieces(rows, shape.num_kv_heads, multiprocessors),
        block=shape.block,
        sliding_window=shape.sliding_window,
    )
    out = _combine(shape, *_increments(shape, grouped, kv, page_table, pieces, grid=multiprocessors), pieces)
    out = out[:, : shape.num_kv_heads * padded].reshape(rows, shape.num_kv_heads, padded, head_dim)
    return out[:, :, : shape.groups].reshape(rows, num_heads, head_dim)


def refusal(q: Float[Array, "T H D"], pages: KVPages) -> str | None:
    """Why these kernels cannot do this; None if they can."""
    head_dim = q.shape[2]
    if not isinstance(pages, PackedPages):
        return "attention 'gpu' reads packed pages only"
    if pages.dtype != jnp.bfloat16:
        return f"attention 'gpu' reads pages of bfloat16, not of {pages.dtype}"
    if head_dim not in HEAD_DIMS:
        return f"attention 'gpu' has head dims {HEAD_DIMS}, not {head_dim}"
    if pages.page_size not in PAGE_SIZES:
        return f"attention 'gpu' has page sizes {PAGE_SIZES}, not {pages.page_size}"
    if q.shape[1] // num_kv_heads(pages, head_dim) > _ROWS:
        return f"attention 'gpu' takes at most {_ROWS} query heads for each KV head"
    return None
