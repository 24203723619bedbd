"""Chunks of prompts on Hopper: many queries of one request, bound by arithmetic. One kernel.

    queries of a request, 128 at a time             context of the request, 128 tokens at a time

    tile   [ 64 queries of consumer 0 ]      x      K  [block] [block] [block] [block]
           [ 64 queries of consumer 1 ]             |  every query sees these  | masked | (not read)
                                                    V  [block] [block] [block] [block]
    item = (tile, query head)
    in time:   consumer 0   | scores |softmax| values | scores |softmax| values |
               consumer 1            | scores |softmax| values | scores |softmax| values |

There is one thread block per multiprocessor. It processes the items `id, id + grid, ...`; tiles with the longest
contexts come first, so that the last ones are short. The producer warpgroup fetches blocks (pipeline.py). Each of the
two consumer warpgroups has 64 queries, so both use every block that is fetched. They take turns: one computes its
softmax while the other has the tensor cores. Each consumer has two loops over blocks. The first, without masks, is for
blocks visible to every query. The second is for blocks on the diagonal, at the edge of a window, or with unwritten
slots.

Before their tiles, consumers share out the other outputs: they combine the pieces of increments (`Combiner` in
increments.py, one row at a time), and write zeros for padding.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.ragged_attention.gpu_plan import ROWS, TILE, ContextPieces, Tiles
from orca_jax.kernels.ragged_attention.hopper.increments import Combiner, Partial, row_of_head
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
    full,
    iota,
    launcher,
    pipeline_scratch,
    produce,
    scores_of,
    silence,
)

_CONSUMERS = TILE // ROWS


@dataclass(frozen=True)
class _ChunkBlock:
    """A thread block of `attend_chunks`: its references, and the work of its three warpgroups."""

    shape: HopperShape
    grid: int
    pipeline: Pipeline
    q: Ref  # [T, H, D]
    kv: Ref
    table: Ref
    fields: Ref
    counts: Ref
    values: Ref  # like the next three, of increments
    mass: Ref
    begin: Ref
    number: Ref
    out: Ref  # [T, H, D]
    q_raw: Ref  # in the layout of TMA
    q_smem: Ref  # in the layout of wgmma
    out_smem: Ref
    turn: Ref
    sinks: tuple[Ref, ...]  # none, or one

    def run(self) -> None:
        """Run the thread block from start to end."""
        items = self.counts[0] * self.q.shape[1] - lax.axis_index("block")
        count = lax.div(items + (self.grid - 1), self.grid)

        @pl.when(lax.axis_index("warpgroup") < _CONSUMERS)
        def _consumer() -> None:
            plgpu.set_max_registers(232, action="increase")
            self.combine_increments()
            self.clear_padding()
            lax.fori_loop(0, count, self.consume, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index("warpgroup") == _CONSUMERS)
        def _producer() -> None:
            plgpu.set_max_registers(40, action="decrease")
            lax.fori_loop(0, count, self.produce, jnp.int32(0))

    @property
    def own_out(self) -> Ref:
        """The part of `out_smem` that belongs to this consumer."""
        return self.out_smem.at[pl.ds(lax.axis_index("warpgroup") * ROWS, ROWS)]

    def own_share(self, items: jax.Array | int) -> tuple[jax.Array, int, jax.Array]:
        """First index, step and number of the `items` assigned to this consumer."""
        first = lax.axis_index("block") + lax.axis_index("warpgroup") * self.grid
        step = self.grid * _CONSUMERS
        return first, step, lax.div(items - first + (step - 1), step)

    def combine_increments(self) -> None:
        """Combine the pieces left by the kernel before."""
        pieces = self.values, self.mass, self.begin, self.number
        combiner = Combiner(self.shape, *pieces, self.sinks, self.out, self.own_out)
        first, step, count = self.own_share(combiner.items)
        lax.fori_loop(0, count, lambda i, _: combiner.combine(first + i * step), None)

    def clear_padding(self) -> None:
        """Write zeros for tokens without a request, so that later operations never read uninitialised memory."""
        (num_tokens, num_heads, _), own_out = self.out.shape, self.own_out
        used = self.counts[1]
        first, step, count = self.own_share(num_tokens - used)

        @pl.when(count > 0)
        def _some() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            own_out[...] = full(0.0, ROWS, self.shape.head_dim).astype(jnp.bfloat16)
            plgpu.commit_smem()

            def clear(index: jax.Array, _: None) -> None:
                for head in range(0, num_heads, ROWS):
                    size = min(ROWS, num_heads - head)
                    place = self.out.at[used + first + index * step, pl.ds(head, size)]
                    plgpu.copy_smem_to_gmem(own_out.at[pl.ds(0, size)], place)

            lax.fori_loop(0, count, clear, None)

    def item(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Tile and query head of an item; the last tile comes first."""
        item = lax.axis_index("block") + index * self.grid
        num_heads = self.q.shape[1]
        return self.counts[0] - 1 - lax.div(item, num_heads), lax.rem(item, num_heads)

    def take_turns(self) -> None:
        """Wait until the other consumer arrives here too."""
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)

    def produce(self, index: jax.Array, step: jax.Array) -> jax.Array:
        """Fetch an item; `step` blocks were fetched before it."""
        tile, head = self.item(index)
        row, query, number, position, first = (self.fields[i, tile] for i in range(5))

        def fetch_q() -> None:
            size = min(ROWS, self.q.shape[0])
            for i in range(_CONSUMERS):
                box = self.q.at[pl.ds(query + i * ROWS, size), head]
                plgpu.copy_gmem_to_smem(
                    box, self.q_raw.at[pl.ds(i * ROWS, size)], self.pipeline.q_ready.at[i]
                )

        item = row, lax.div(head, self.shape.groups), first, position + number
        return produce(
            self.shape, self.pipeline, (self.kv, self.table), item, fetch_q, index == 0, step
        )

    def consume(self, index: jax.Array, step: jax.Array) -> jax.Array:
        """Process the 64 queries of an item that belong to this warpgroup."""
        shape = self.shape
        mine = lax.axis_index("warpgroup")
        tile, head = self.item(index)
        query, number, position, first, context = (self.fields[i, tile] for i in range(1, 6))
        num_blocks = lax.div(position + number - first + (shape.block - 1), shape.block)
        own_first = position + mine * ROWS
        window = shape.scores.sliding_window
        seen = None if window is None else position + 1 - window, context
        self.arrange_queries()

        def block(i: jax.Array, state: HopperSoftmax, *, is_masked: bool) -> HopperSoftmax:
            slot = lax.rem(step + i, shape.stages)
            token = first + i * shape.block
            return self.multiply(slot, token, own_first, seen if is_masked else None, state)

        # Blocks that end before the first query need no mask if all of their slots are written.
        known = jnp.minimum(own_first + 1, context)
        open_blocks = (
            lax.div(known - first, shape.block)
            if shape.scores.sliding_window is None
            else jnp.int32(0)
        )
        open_blocks = jnp.minimum(open_blocks, num_blocks)
        pl.when(mine == 1)(self.take_turns)
        state = empty_softmax(shape)
        state = lax.fori_loop(0, open_blocks, partial(block, is_masked=False), state)
        state = lax.fori_loop(open_blocks, num_blocks, partial(block, is_masked=True), state)
        pl.when(mine == 0)(self.take_turns)
        # the copy of the item before may still read this memory
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own_out = self.own_out
        denominator = state.denominator
        for sinks in self.sinks:
            denominator = denominator + jnp.exp2(sinks[row_of_head(shape, head)] - state.top)
        own_out[...] = (state.values / across(denominator, state.values)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        _write_tile(own_out, self.out, head, query + mine * ROWS, number - mine * ROWS)
        return step + num_blocks

    def arrange_queries(self) -> None:
        """Copy the queries into the layout of wgmma.

        TMA can write that layout only from a row divisible by 8, and a request may begin at any row.
        """
        mine = lax.axis_index("warpgroup")
        own = pl.ds(mine * ROWS, ROWS)
        plgpu.barrier_wait(self.pipeline.q_ready.at[mine])
        place = self.q_smem.at[own]
        place[...] = plgpu.load(self.q_raw.at[own], layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.pipeline.q_free)

    def multiply(
        self,
        slot: jax.Array,
        token: jax.Array,
        own_first: jax.Array,
        seen: tuple[jax.Array | None, jax.Array] | None,
        state: HopperSoftmax,
    ) -> HopperSoftmax:
        """Process the block from `token` on, for queries from `own_first` on.

        It is masked if `seen` is given: the first token that a query of the tile sees, None for all, and the context.
        """
        shape = self.shape
        pipeline = self.pipeline
        mine = lax.axis_index("warpgroup")
        v = pipeline.v.at[slot]
        plgpu.barrier_wait(pipeline.k_ready.at[slot])
        scores = scores_of(shape, self.q_smem.at[pl.ds(mine * ROWS, ROWS)], pipeline.k.at[slot])
        self.take_turns()
        plgpu.barrier_arrive(pipeline.k_free.at[slot])
        if seen is not None:
            ahead = (own_first - token) + iota(shape, 0) - iota(shape, 1)  # of the key
            visible = ahead >= 0
            if shape.scores.sliding_window is not None:
                visible = visible & (ahead < shape.scores.sliding_window)
            scores = jnp.where(visible, scores, MASKED)
        state, weights = add_weights(state, scores)
        plgpu.barrier_wait(pipeline.v_ready.at[slot])
        if seen is not None:
            begin, context = seen
            # The first consumer is a turn ahead of the second, so the second finds the zeros in place.
            is_mine = (mine == 0) & (token + shape.block > context)
            if begin is not None:
                is_mine = is_mine | ((mine == 0) & (token < begin))
            passed = None if begin is None else begin - token
            pl.when(is_mine)(lambda: silence(shape, v, passed, context - token))
        self.take_turns()
        state = add_values(shape, state, weights, v)
        plgpu.barrier_arrive(pipeline.v_free.at[slot])
        return state


def attend_chunks(
    shape: HopperShape,
    q: Float[Array, "T H D"],
    kv: Float[Array, "N S W"],
    page_table: Int[Array, "R P"],
    tiles: Tiles,
    increments: tuple[Partial, ContextPieces],
    num_used: Int[Array, ""],
    sinks: list[jax.Array],
    *,
    grid: int,
) -> Float[Array, "T H D"]:
    """Compute attention for all tiles, combine increments, and write zeros for tokens at and after `num_used`.

    `sinks` are those of `sinks_of_tiles`.
    """

    def chunks(*refs: Ref) -> None:
        last = 9 + len(sinks)  # of the inputs
        work = (*refs[:9], *refs[last : last + 5], refs[9:last])
        pipeline = Pipeline(*refs[last + 5 :])
        _ChunkBlock(shape, grid, pipeline, *work).run()

    scratch = [
        plgpu.SMEM((TILE, shape.head_dim), jnp.bfloat16),
        shape.smem(TILE, shape.head_dim),
        plgpu.SMEM((TILE, shape.head_dim), jnp.bfloat16),
        plgpu.Barrier(num_arrivals=_CONSUMERS),
        *pipeline_scratch(shape, _CONSUMERS, sharing=_CONSUMERS),
    ]
    results = (jax.ShapeDtypeStruct(q.shape, jnp.bfloat16),)
    launch = launcher(chunks, results, scratch, {"block": grid}, _CONSUMERS + 1, shape.interpret)
    counts = jnp.stack([tiles.total[0], num_used])
    pieces, (values, mass) = increments[1], increments[0]
    return launch(
        q, kv, page_table, tiles.fields, counts, values, mass, pieces.begin, pieces.number, *sinks
    )[0]


def _write_tile(smem: Ref, out: Ref, head: jax.Array, first: jax.Array, number: jax.Array) -> None:
    """Copy up to 64 rows: at once if the tile is full, otherwise row by row.

    The rows after a partial tile belong to other items. TMA copies from multiples of 128 bytes only, and so do rows:
    those of head dims 80 and 96 would fault.
    """
    assert smem.shape[1] * 2 % 128 == 0, "a row of a tile must begin at a multiple of 128 bytes"

    @pl.when(number >= ROWS)
    def _whole() -> None:
        plgpu.copy_smem_to_gmem(smem, out.at[pl.ds(first, ROWS), head])

    @pl.when(number < ROWS)
    def _part() -> None:
        def copy(row: jax.Array, _: None) -> None:
            plgpu.copy_smem_to_gmem(smem.at[pl.ds(row, 1)], out.at[pl.ds(first + row, 1), head])

        lax.fori_loop(0, jnp.minimum(number, ROWS), copy, None)
