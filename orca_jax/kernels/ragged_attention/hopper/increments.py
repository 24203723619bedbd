"""Increments on Hopper: one query for each row, bound by memory. A kernel for pieces, and `Combiner` for their sum.

                         page_table[row]
    context of a row     | page | page | page | page | page |        cut into pieces of one length for all rows
                         [   piece 0   |   piece 1   | piece 2 ]     (gpu_plan.cut_contexts)

    item = (piece, KV head)        q box   [G, D]       heads that share K and V, in the 64 rows of wgmma
                                   K, V    [block, D]   64 or 128 tokens; see pipeline.py

    an item's blocks               | 0 | 1 | 2 | 3 | 4 | 5 |...
    consumer 0                     | scores, softmax, values of 0 | ... of 2 | ... of 4 |
    consumer 1                     | scores, softmax, values of 1 | ... of 3 | ... of 5 |

    result (`Partial`)             values [G, D] and mass [G] for each piece, consumer and KV head, float32

`attend_pieces` is the kernel, with one thread block per multiprocessor. Pieces are short: even for a single request,
pieces * K items keep every thread block busy. They are also few: their partial results stay small. A thread block
processes the items `id, id + grid, ...`. Its producer warpgroup fetches, and each of its two consumer warpgroups loops
over every second block. Neighbouring items are heads of the same pages, so DRAM rows are read whole.

There are two consumers because G fills only some of the 64 rows of wgmma, but products and softmax are computed for all
64. A single consumer, with products and softmax one after the other, would take 0.6 (heads of 128) to 0.9 (heads of 64)
of the memory time of a block, even without any wait. Each of the two has its own softmax and its own result, so
they never wait for each other. Queries stay in registers.

`Combiner` runs in the next kernel (chunks.py), before its chunks: a separate kernel would take longer to start than to
run. Its items are (row, tile of as many heads as fit into 64 rows). It loops over the pieces of one row and weights
them by their log-sum-exp:

    row r:   pieces begin[r] ... begin[r] + number[r] - 1, of both consumers   -->   out[r]   bf16
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.ragged_attention.gpu_plan import ROWS, ContextPieces
from orca_jax.kernels.ragged_attention.hopper.pipeline import (
    MASKED,
    HopperShape,
    HopperSoftmax,
    Pipeline,
    Ref,
    across,
    add_values,
    add_weights,
    empty_softmax,
    iota,
    launcher,
    pipeline_scratch,
    produce,
    scores_of,
    silence,
)

CONSUMERS = 2
_SMALL = 1e-30  # replaces a sum of no weights


class Partial(NamedTuple):
    """Partial results: part `CONSUMERS * piece + consumer` has `part_rows`, padded G for each KV head.

    64 more rows follow the last part, because 64 rows are read at once.
    """

    values: Float[Array, "M D"]  # normalised
    # log-sum-exp, in bits; close to `MASKED` for a consumer without a block
    mass: Float[Array, " M"]


def padded_groups(shape: HopperShape) -> int:
    """Rows of one KV head in a part: a multiple of 4, as TMA copies masses in units of 16 bytes."""
    return pl.cdiv(shape.groups, 4) * 4


def heads_in_tile(shape: HopperShape) -> int:
    """Number of KV heads combined together."""
    return ROWS // padded_groups(shape)


def part_rows(shape: HopperShape) -> int:
    """Number of rows of one part."""
    return shape.num_kv_heads * padded_groups(shape)


def sinks_of_tiles(shape: HopperShape, sinks: Float[Array, " H"] | None) -> list[jax.Array]:
    """The sinks in bits, if there are some: 64 for each tile of query heads that are combined together."""
    if sinks is None:
        return []
    tiles = pl.cdiv(shape.num_kv_heads, heads_in_tile(shape))
    missing = tiles * heads_in_tile(shape) - shape.num_kv_heads, padded_groups(shape) - shape.groups
    by_head = (sinks.astype(jnp.float32) * math.log2(math.e)).reshape(-1, shape.groups)
    rows = jnp.pad(by_head, ((0, missing[0]), (0, missing[1]))).reshape(tiles, -1)
    return [jnp.pad(rows, ((0, 0), (0, ROWS - rows.shape[1]))).reshape(-1)]


def row_of_head(shape: HopperShape, head: Int[Array, ""]) -> Int[Array, ""]:
    """The row of a query head in tiles of 64."""
    own = lax.div(head, shape.groups)
    group = lax.rem(head, shape.groups)
    tile = lax.div(own, heads_in_tile(shape))
    place = lax.rem(own, heads_in_tile(shape))
    return tile * ROWS + place * padded_groups(shape) + group


@dataclass(frozen=True)
class _IncrementBlock:
    """A thread block of `attend_pieces`: its references, and the work of its three warpgroups."""

    shape: HopperShape
    grid: int
    pipeline: Pipeline
    q: Ref  # [T, H, D]; queries of increments come first, one per row
    kv: Ref
    table: Ref
    fields: Ref
    total: Ref
    out: Ref
    mass: Ref
    q_smem: Ref  # like the next two, 64 rows for each consumer
    out_smem: Ref
    mass_smem: Ref

    def run(self) -> None:
        """Run the thread block from start to end."""
        items = self.total[0] * self.shape.num_kv_heads - lax.axis_index("block")
        count = lax.div(items + (self.grid - 1), self.grid)

        @pl.when(lax.axis_index("warpgroup") < CONSUMERS)
        def _consumer() -> None:
            plgpu.set_max_registers(232, action="increase")
            lax.fori_loop(0, count, self.consume, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("warpgroup") == CONSUMERS)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")
            lax.fori_loop(0, count, self.produce, jnp.int32(0))

    def item(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Piece and KV head of an item."""
        item = lax.axis_index("block") + index * self.grid
        return lax.div(item, self.shape.num_kv_heads), lax.rem(item, self.shape.num_kv_heads)

    def produce(self, index: jax.Array, step: jax.Array) -> jax.Array:
        """Fetch an item; `step` blocks were fetched before it."""
        piece, head = self.item(index)
        row, first, end = (self.fields[i, piece] for i in range(3))

        def fetch_q() -> None:
            groups = self.shape.groups
            box = self.q.at[row, pl.ds(head * groups, groups)]
            for i in range(CONSUMERS):
                plgpu.copy_gmem_to_smem(
                    box, self.q_smem.at[pl.ds(i * ROWS, groups)], self.pipeline.q_ready.at[i]
                )

        pages = self.kv, self.table
        return produce(
            self.shape, self.pipeline, pages, (row, head, first, end), fetch_q, index == 0, step
        )

    def consume(self, index: jax.Array, step: jax.Array) -> jax.Array:
        """Process every second block of an item: those in the slots of this warpgroup."""
        shape = self.shape
        mine = lax.axis_index("warpgroup")
        piece, head = self.item(index)
        first, end, low = (self.fields[i, piece] for i in range(1, 4))
        plgpu.barrier_wait(self.pipeline.q_ready.at[mine])
        q = plgpu.load(
            self.q_smem.at[pl.ds(mine * ROWS, ROWS)], layout=plgpu.Layout.WGMMA, optimized=False
        )
        plgpu.barrier_arrive(self.pipeline.q_free)
        own_first = lax.rem(step + mine, CONSUMERS)

        def block(i: jax.Array, state: HopperSoftmax, *, is_masked: bool) -> HopperSoftmax:
            number = own_first + i * CONSUMERS
            visible = (first + number * shape.block, low, end) if is_masked else None
            return self.multiply(lax.rem(step + number, shape.stages), q, visible, state)

        def own(blocks: jax.Array) -> jax.Array:
            return lax.div(blocks - own_first + (CONSUMERS - 1), CONSUMERS)

        num_blocks = lax.div(end - first + (shape.block - 1), shape.block)
        full = (
            own(lax.div(end - first, shape.block))
            if shape.scores.sliding_window is None
            else jnp.int32(0)
        )
        state = lax.fori_loop(0, full, partial(block, is_masked=False), empty_softmax(shape))
        state = lax.fori_loop(full, own(num_blocks), partial(block, is_masked=True), state)
        self.write(piece, head, state)
        return step + num_blocks

    def multiply(
        self,
        slot: jax.Array,
        q: Float[Array, "64 D"],
        visible: tuple[jax.Array, jax.Array, jax.Array] | None,
        state: HopperSoftmax,
    ) -> HopperSoftmax:
        """Process one block.

        `visible` is None if nothing is masked. Otherwise it holds the first token of the block, the first token
        visible to the query, and the end of the visible tokens.
        """
        shape = self.shape
        pipeline = self.pipeline
        plgpu.barrier_wait(pipeline.k_ready.at[slot])
        scores = scores_of(shape, q, pipeline.k.at[slot])
        plgpu.barrier_arrive(pipeline.k_free.at[slot])
        if visible is not None:
            token, low, end = visible
            position = token + iota(shape, 1)
            scores = jnp.where((position >= low) & (position < end), scores, MASKED)
        state, weights = add_weights(state, scores)
        v = pipeline.v.at[slot]
        plgpu.barrier_wait(pipeline.v_ready.at[slot])
        if visible is not None:
            begin = None if shape.scores.sliding_window is None else low - token
            is_partial = token + shape.block > end
            if begin is not None:
                is_partial = is_partial | (begin > 0)
            pl.when(is_partial)(lambda: silence(shape, v, begin, end - token))
        state = add_values(shape, state, weights, v)
        plgpu.barrier_arrive(pipeline.v_free.at[slot])
        return state

    def write(self, piece: jax.Array, head: jax.Array, state: HopperSoftmax) -> None:
        """Write this consumer's part of an item; without a block, the part is zeros with almost no mass."""
        mine = lax.axis_index("warpgroup")
        padded = padded_groups(self.shape)
        denominator = jnp.maximum(state.denominator, _SMALL)
        out, mass = (smem.at[pl.ds(mine * ROWS, ROWS)] for smem in (self.out_smem, self.mass_smem))
        # the copy of the item before may still read this memory
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out[...] = state.values / across(denominator, state.values)
        mass[...] = state.top + jnp.log2(denominator)
        plgpu.commit_smem()
        start = (piece * CONSUMERS + mine) * part_rows(self.shape) + head * padded
        for source, result in ((self.out_smem, self.out), (self.mass_smem, self.mass)):
            plgpu.copy_smem_to_gmem(
                source.at[pl.ds(mine * ROWS, padded)],
                result.at[pl.ds(pl.multiple_of(start, 4), padded)],
            )


def attend_pieces(
    shape: HopperShape,
    q: Float[Array, "T H D"],
    kv: Float[Array, "N S W"],
    page_table: Int[Array, "R P"],
    pieces: ContextPieces,
    *,
    grid: int,
) -> Partial:
    """Compute attention for every piece of every increment."""

    def increments(*refs: Ref) -> None:
        _IncrementBlock(shape, grid, Pipeline(*refs[10:]), *refs[:10]).run()

    assert shape.stages % CONSUMERS == 0, (
        "each slot belongs to one consumer, which processes all blocks in it"
    )
    rows = pieces.fields.shape[1] * CONSUMERS * part_rows(shape) + ROWS
    results = (
        jax.ShapeDtypeStruct((rows, shape.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((rows,), jnp.float32),
    )
    scratch = [
        plgpu.SMEM((CONSUMERS * ROWS, shape.head_dim), jnp.bfloat16),
        plgpu.SMEM((CONSUMERS * ROWS, shape.head_dim), jnp.float32),
        plgpu.SMEM((CONSUMERS * ROWS,), jnp.float32),
        *pipeline_scratch(shape, CONSUMERS, sharing=1),
    ]
    launch = launcher(increments, results, scratch, {"block": grid}, CONSUMERS + 1, shape.interpret)
    return Partial(*launch(q, kv, page_table, pieces.fields, pieces.total))


@dataclass(frozen=True)
class Combiner:
    """Combines the pieces of each row. One warpgroup runs it.

    Attributes:
        shape: parameters of the kernel that runs it.
        values, mass: fields of a `Partial`.
        begin, number: fields of `ContextPieces`.
        sinks: those of `sinks_of_tiles`; none, or one reference.
        out: [T, H, D]; rows without pieces are not written.
        smem: [64, D] of bf16; an earlier copy may still read it.
    """

    shape: HopperShape
    values: Ref
    mass: Ref
    begin: Ref
    number: Ref
    sinks: tuple[Ref, ...]
    out: Ref
    smem: Ref

    @property
    def items(self) -> int:
        """Number of tiles in all rows."""
        return int(self.begin.shape[0]) * self._tiles

    @property
    def _tiles(self) -> int:
        return pl.cdiv(self.shape.num_kv_heads, heads_in_tile(self.shape))

    def combine(self, item: jax.Array) -> None:
        """Combine one tile of one row."""
        row = lax.div(item, self._tiles)
        tile = lax.rem(item, self._tiles)

        @pl.when(self.number[row] > 0)
        def _any() -> None:
            parts = self.number[row] * CONSUMERS
            state = lax.fori_loop(
                0, parts, partial(self._add, row, tile), empty_softmax(self.shape)
            )
            denominator = state.denominator
            for sinks in self.sinks:
                mine = pl.ds(pl.multiple_of(tile * ROWS, ROWS), ROWS)
                sink = plgpu.load(
                    sinks.at[mine], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
                )
                denominator = denominator + jnp.exp2(sink - state.top)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.smem[...] = (state.values / across(denominator, state.values)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            for place in range(heads_in_tile(self.shape)):
                head = tile * heads_in_tile(self.shape) + place
                pl.when(head < self.shape.num_kv_heads)(partial(self._write, row, head, place))

    def _add(
        self, row: jax.Array, tile: jax.Array, index: jax.Array, state: HopperSoftmax
    ) -> HopperSoftmax:
        """Add one consumer's part of a piece."""
        part = self.begin[row] * CONSUMERS + index
        size = heads_in_tile(self.shape) * padded_groups(self.shape)
        mine = pl.ds(pl.multiple_of(part * part_rows(self.shape) + tile * size, 4), ROWS)
        mass = plgpu.load(self.mass.at[mine], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
        values = plgpu.load(self.values.at[mine], layout=plgpu.Layout.WGMMA, optimized=False)
        top = jnp.maximum(state.top, mass)
        shrink = jnp.exp2(state.top - top)
        weight = jnp.exp2(mass - top)
        values = state.values * across(shrink, values) + values * across(weight, values)
        return HopperSoftmax(top, state.denominator * shrink + weight, values)

    def _write(self, row: jax.Array, head: jax.Array, place: int) -> None:
        """Write the outputs of the query heads of one KV head."""
        groups = self.shape.groups
        source = self.smem.at[pl.ds(place * padded_groups(self.shape), groups)]
        plgpu.copy_smem_to_gmem(source, self.out.at[row, pl.ds(head * groups, groups)])
