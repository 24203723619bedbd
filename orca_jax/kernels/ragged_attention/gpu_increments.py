"""Increments on Hopper: one query for each row, bound by memory. Two kernels.

                         page_table[row]
    context of a row     | page | page | page | page | page |        cut into pieces of one length for all rows
                         [   piece 0   |   piece 1   | piece 2 ]     (gpu_plan.cut_contexts)

    item = (piece, KV head)        q box   [G, D]       of the heads that share K and V, padded to wgmma's 64 rows
                                   K, V    [block, D]   64 or 128 tokens; see gpu_common.py
    result                         out     [piece, K * G, D] and lse [piece, K * G], float32

1. `attend_pieces`, one thread block for each multiprocessor. Pieces are short enough that pieces * K items keep every
   thread block busy even for a single request, and few enough that their partial results stay small. A thread block
   owns the items `id, id + grid, ...`; of each, a producer warpgroup owns the fetching and a consumer warpgroup the
   loop over blocks. G fills only some of wgmma's 64 rows; tensor cores are idle here anyway, and padding costs
   neither memory traffic nor time. Neighbouring items are heads of the same pages, so DRAM rows are read whole.
2. `combine_pieces`, grid (row, 64 rows of (head, group)): its loop owns one request's pieces, and weighs them by
   their log-sum-exp.
"""

from dataclasses import dataclass

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
    add_weights,
    empty_softmax,
    iota,
    launcher,
    places_in,
    produce,
    scores_of,
    silence,
    weighted,
)
from orca_jax.kernels.ragged_attention.gpu_plan import ROWS, Pieces


@dataclass(frozen=True)
class _IncrementBlock:
    """A thread block of `attend_pieces`: references to all that it works on, and what its two warpgroups do."""

    shape: Shape
    grid: int
    places: Places
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
        return produce(self.shape, self.places, pages, (row, head, first, end), fetch_q, index == 0, step)

    def consume(self, index: jax.Array, step: jax.Array) -> jax.Array:
        """Multiply an item."""
        piece, head = self.item(index)
        first, end, low = (self.fields[i, piece] for i in range(1, 4))
        plgpu.barrier_wait(self.places.q_there.at[0])

        def block(i: jax.Array, state: Softmax) -> Softmax:
            return self.multiply(lax.rem(step + i, self.shape.stages), first + i * self.shape.block, end, low, state)

        num_blocks = lax.div(end - first + (self.shape.block - 1), self.shape.block)
        state = lax.fori_loop(0, num_blocks, block, empty_softmax(self.shape))
        plgpu.barrier_arrive(self.places.q_free)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the item before is on its way
        self.out_smem[...] = state.values / across(state.denominator, state.values)
        self.lse_smem[...] = state.top + jnp.log2(state.denominator)
        plgpu.commit_smem()
        padded = self.q.shape[2]
        mine = pl.ds(pl.multiple_of(head * padded, 8), padded)
        plgpu.copy_smem_to_gmem(self.out_smem.at[pl.ds(0, padded)], self.out.at[piece, mine])
        plgpu.copy_smem_to_gmem(self.lse_smem.at[pl.ds(0, padded)], self.lse.at[piece, mine])
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
        state = state._replace(values=state.values + weighted(shape, weights, v))
        plgpu.barrier_arrive(places.v_free.at[slot])
        return state


def attend_pieces(
    shape: Shape,
    q: Float[Array, "R K G D"],
    kv: Float[Array, "N S W"],
    page_table: Int[Array, "R P"],
    pieces: Pieces,
    *,
    grid: int,
) -> tuple[Float[Array, "I M D"], Float[Array, "I M"]]:
    """Attention of each piece of each increment: normalised values and log-sum-exp in bits, `M >= K * G`."""

    def increments(*refs: Ref) -> None:
        _IncrementBlock(shape, grid, Places(*refs[10:]), *refs[:10]).run()

    num_pieces, rows = pieces.fields.shape[1], pl.cdiv(shape.num_kv_heads * q.shape[2], ROWS) * ROWS
    results = (
        jax.ShapeDtypeStruct((num_pieces, rows, shape.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_pieces, rows), jnp.float32),
    )
    scratch = [
        shape.smem(ROWS, shape.head_dim),
        plgpu.SMEM((ROWS, shape.head_dim), jnp.float32),
        plgpu.SMEM((ROWS,), jnp.float32),
        *places_in(shape, consumers=1),
    ]
    launch = launcher(increments, results, scratch, {"block": grid}, 2, shape.interpret)
    out, lse = launch(q, kv, page_table, pieces.fields, pieces.total)
    return out, lse


def combine_pieces(
    shape: Shape, out: Float[Array, "I M D"], lse: Float[Array, "I M"], pieces: Pieces
) -> Float[Array, "R M D"]:
    """The pieces of each request together, in bf16; rows without pieces stay as they are in memory."""
    rows = pieces.begin.shape[0]

    def combine(out_ref: Ref, lse_ref: Ref, begin: Ref, count: Ref, result: Ref, smem: Ref) -> None:
        row = lax.axis_index("row")
        mine = pl.ds(pl.multiple_of(lax.axis_index("heads") * ROWS, ROWS), ROWS)
        first, number = begin[row], count[row]

        def add(index: jax.Array, state: Softmax) -> Softmax:
            piece = first + index
            mass = plgpu.load(lse_ref.at[piece, mine], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            values = plgpu.load(out_ref.at[piece, mine], layout=plgpu.Layout.WGMMA, optimized=False)
            top = jnp.maximum(state.top, mass)
            shrink, weight = jnp.exp2(state.top - top), jnp.exp2(mass - top)
            values = state.values * across(shrink, values) + values * across(weight, values)
            return Softmax(top, state.denominator * shrink + weight, values)

        @pl.when(number > 0)
        def _any() -> None:
            state = lax.fori_loop(0, number, add, empty_softmax(shape))
            smem[...] = (state.values / across(state.denominator, state.values)).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, result.at[row, mine])
            plgpu.wait_smem_to_gmem(0)

    results = (jax.ShapeDtypeStruct((rows, *out.shape[1:]), jnp.bfloat16),)
    grid = {"row": rows, "heads": out.shape[1] // ROWS}
    scratch = [plgpu.SMEM((ROWS, shape.head_dim), jnp.bfloat16)]
    launch = launcher(combine, results, scratch, grid, 1, shape.interpret)
    return launch(out, lse, pieces.begin, pieces.number)[0]
