"""Increments on Hopper: one query for each row, bound by memory. A kernel for pieces, and what weighs them together.

                         page_table[row]
    context of a row     | page | page | page | page | page |        cut into pieces of one length for all rows
                         [   piece 0   |   piece 1   | piece 2 ]     (gpu_plan.cut_contexts)

    item = (piece, KV head)        q box   [G, D]       of the heads that share K and V, in wgmma's 64 rows
                                   K, V    [block, D]   64 or 128 tokens; see gpu_common.py
    result (`Partial`)             values  [piece, K * padded G, D] and mass [piece, K * padded G], float32

`attend_pieces` is the kernel, one thread block for each multiprocessor. Pieces are short enough that pieces * K items
keep every thread block busy even for a single request, and few enough that their partial results stay small. A thread
block owns the items `id, id + grid, ...`; of each, a producer warpgroup owns the fetching and a consumer warpgroup the
loop over blocks. G fills only some of wgmma's 64 rows; tensor cores are idle here anyway, and rows that hold no query
cost no memory traffic. Neighbouring items are heads of the same pages, so DRAM rows are read whole.

`Combiner` runs in the next kernel (gpu_chunks.py), before its chunks: a kernel of its own would cost more to start than
to run. Its items are (row, tile of as many heads as fit 64 rows), its loop owns the pieces of one row and weighs
them by their log-sum-exp:

    row r:   values[begin[r]] ... values[begin[r] + number[r] - 1]   -->   out[r]   bf16, without the padding of G
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.ragged_attention.gpu_common import (
    MASKED,
    Places,
    Ref,
    Shape,
    Softmax,
    across,
    add_values,
    add_weights,
    arrange_queries,
    empty_softmax,
    iota,
    launcher,
    places_in,
    produce,
    scores_of,
    silence,
)
from orca_jax.kernels.ragged_attention.gpu_plan import ROWS, Pieces


class Partial(NamedTuple):
    """What `attend_pieces` leaves, M = `partial_rows` of (head, group) to a piece."""

    values: Float[Array, "I M D"]  # normalised
    mass: Float[Array, "I M"]  # log-sum-exp, in bits


def padded_groups(shape: Shape) -> int:
    """Rows of `Partial` that a KV head has: TMA copies masses in units of 16 bytes."""
    return pl.cdiv(shape.groups, 8) * 8


def heads_in_tile(shape: Shape) -> int:
    """KV heads whose rows of `Partial` are weighed together."""
    return ROWS // padded_groups(shape)


def partial_rows(shape: Shape) -> int:
    """M: those of all heads, and as many more as fill the last tile."""
    tiles = pl.cdiv(shape.num_kv_heads, heads_in_tile(shape))
    return (tiles - 1) * heads_in_tile(shape) * padded_groups(shape) + ROWS


@dataclass(frozen=True)
class _IncrementBlock:
    """A thread block of `attend_pieces`: references to all that it works on, and what its two warpgroups do."""

    shape: Shape
    grid: int
    places: Places
    q: Ref  # [T, H, D]; those of increments come first, one for each row
    kv: Ref
    table: Ref
    fields: Ref
    total: Ref
    out: Ref
    mass: Ref
    q_raw: Ref  # as TMA brings it
    q_smem: Ref  # as wgmma wants it
    out_smem: Ref
    mass_smem: Ref

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
            groups = self.shape.groups
            box = self.q.at[row, pl.ds(head * groups, groups)]
            plgpu.copy_gmem_to_smem(box, self.q_raw.at[pl.ds(0, groups)], self.places.q_there.at[0])

        pages = self.kv, self.table
        return produce(self.shape, self.places, pages, (row, head, first, end), fetch_q, index == 0, step)

    def consume(self, index: jax.Array, step: jax.Array) -> jax.Array:
        """Multiply an item."""
        piece, head = self.item(index)
        first, end, low = (self.fields[i, piece] for i in range(1, 4))
        arrange_queries(self.q_raw, self.q_smem, self.places.q_there.at[0], self.places.q_free)

        def block(i: jax.Array, state: Softmax) -> Softmax:
            return self.multiply(lax.rem(step + i, self.shape.stages), first + i * self.shape.block, end, low, state)

        num_blocks = lax.div(end - first + (self.shape.block - 1), self.shape.block)
        state = lax.fori_loop(0, num_blocks, block, empty_softmax(self.shape))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before is on its way
        self.out_smem[...] = state.values / across(state.denominator, state.values)
        self.mass_smem[...] = state.top + jnp.log2(state.denominator)
        plgpu.commit_smem()
        padded = padded_groups(self.shape)
        mine = pl.ds(pl.multiple_of(head * padded, 8), padded)
        plgpu.copy_smem_to_gmem(self.out_smem.at[pl.ds(0, padded)], self.out.at[piece, mine])
        plgpu.copy_smem_to_gmem(self.mass_smem.at[pl.ds(0, padded)], self.mass.at[piece, mine])
        return step + num_blocks

    def multiply(self, slot: jax.Array, token: jax.Array, end: jax.Array, low: jax.Array, state: Softmax) -> Softmax:
        """One block, whose first token is `token`; the query sees `low <= token < end`."""
        shape, places = self.shape, self.places
        plgpu.barrier_wait(places.k_there.at[slot])
        scores = scores_of(shape, self.q_smem, places.k.at[slot])
        plgpu.barrier_arrive(places.k_free.at[slot])
        position = token + iota(shape, 1)
        visible = position < end
        if shape.sliding_window is not None:
            visible = visible & (position >= low)
        state, weights = add_weights(state, jnp.where(visible, scores, MASKED))
        v = places.v.at[slot]
        plgpu.barrier_wait(places.v_there.at[slot])
        pl.when(token + shape.block > end)(lambda: silence(shape, v, end - token))
        state = add_values(shape, state, weights, v)
        plgpu.barrier_arrive(places.v_free.at[slot])
        return state


def attend_pieces(
    shape: Shape,
    q: Float[Array, "T H D"],
    kv: Float[Array, "N S W"],
    page_table: Int[Array, "R P"],
    pieces: Pieces,
    *,
    grid: int,
) -> Partial:
    """Attention of each piece of each increment."""

    def increments(*refs: Ref) -> None:
        _IncrementBlock(shape, grid, Places(*refs[11:]), *refs[:11]).run()

    num_pieces, rows = pieces.fields.shape[1], partial_rows(shape)
    results = (
        jax.ShapeDtypeStruct((num_pieces, rows, shape.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_pieces, rows), jnp.float32),
    )
    scratch = [
        plgpu.SMEM((ROWS, shape.head_dim), jnp.bfloat16),
        shape.smem(ROWS, shape.head_dim),
        plgpu.SMEM((ROWS, shape.head_dim), jnp.float32),
        plgpu.SMEM((ROWS,), jnp.float32),
        *places_in(shape, consumers=1),
    ]
    launch = launcher(increments, results, scratch, {"block": grid}, 2, shape.interpret)
    return Partial(*launch(q, kv, page_table, pieces.fields, pieces.total))


@dataclass(frozen=True)
class Combiner:
    """Weighs the pieces of rows together; run by one warpgroup.

    Attributes:
        shape: of the kernel that runs it.
        values, mass: a `Partial`.
        begin, number: of `Pieces`.
        out: [T, H, D]; rows without pieces stay as they are in memory.
        smem: [64, D] of bf16, where what was copied last may still be on its way.
    """

    shape: Shape
    values: Ref
    mass: Ref
    begin: Ref
    number: Ref
    out: Ref
    smem: Ref

    @property
    def items(self) -> int:
        """Tiles of all rows."""
        return int(self.begin.shape[0]) * self._tiles

    @property
    def _tiles(self) -> int:
        return pl.cdiv(self.shape.num_kv_heads, heads_in_tile(self.shape))

    def combine(self, item: jax.Array) -> None:
        """One tile of one row."""
        row, tile = lax.div(item, self._tiles), lax.rem(item, self._tiles)

        @pl.when(self.number[row] > 0)
        def _any() -> None:
            state = lax.fori_loop(0, self.number[row], partial(self._add, row, tile), empty_softmax(self.shape))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.smem[...] = (state.values / across(state.denominator, state.values)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            for place in range(heads_in_tile(self.shape)):
                head = tile * heads_in_tile(self.shape) + place
                pl.when(head < self.shape.num_kv_heads)(partial(self._write, row, head, place))

    def _add(self, row: jax.Array, tile: jax.Array, index: jax.Array, state: Softmax) -> Softmax:
        """One piece more."""
        size = heads_in_tile(self.shape) * padded_groups(self.shape)
        piece, mine = self.begin[row] + index, pl.ds(pl.multiple_of(tile * size, 8), ROWS)
        mass = plgpu.load(self.mass.at[piece, mine], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        values = plgpu.load(self.values.at[piece, mine], layout=plgpu.Layout.WGMMA, optimized=False)
        top = jnp.maximum(state.top, mass)
        shrink, weight = jnp.exp2(state.top - top), jnp.exp2(mass - top)
        values = state.values * across(shrink, values) + values * across(weight, values)
        return Softmax(top, state.denominator * shrink + weight, values)

    def _write(self, row: jax.Array, head: jax.Array, place: int) -> None:
        """The queries that share a KV head."""
        groups = self.shape.groups
        source = self.smem.at[pl.ds(place * padded_groups(self.shape), groups)]
        plgpu.copy_smem_to_gmem(source, self.out.at[row, pl.ds(head * groups, groups)])
