"""Shared parts of the Hopper kernels: the path of K and V to registers, and the softmax.

A thread block has one producer warpgroup and two consumer warpgroups. The producer only starts TMA copies of blocks;
consumers only wait and multiply. Each block passes through one of `stages` slots in shared memory:

    page [S, W]   one head's K and V are two column ranges          slot s of `stages`
                  [K D][V D]  [K D][V D]  ...
                   |    |
                   |    +-- box [block, D] -- TMA -->  v[s]  -- v_ready[s] -->  consumers multiply  -- v_free[s] --+
                   +------- box [block, D] -- TMA -->  k[s]  -- k_ready[s] -->  consumers multiply  -- k_free[s] --+
                                                        ^                                                          |
                                                        +------------------ the producer's next block <------------+

The producer loops over the blocks of one item (`produce`): it waits for a free slot, fetches, and continues with the
blocks of the next item without a pause. So slots stay full across the boundary between two items. Each consumer
computes 64 rows, the size of a wgmma. Scores, maxima, sums and weighted values are float32 and stay in registers
(`HopperSoftmax`) from the first block of an item to the last.

Unwritten slots of a page, and those before a window, may hold NaN. Their scores are masked, and their V is overwritten
by zeros in shared memory (`silence`), which only the first and the last block of an item need.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.ragged_attention.api import Scores
from orca_jax.kernels.ragged_attention.gpu_plan import ROWS

MASKED = -1e30  # finite: a fully masked block must not make NaN out of inf - inf
_LOG2E = math.log2(math.e)

Ref = Any  # Pallas has no public type for references


@dataclass(frozen=True)
class HopperShape:
    """Static parameters shared by both attention kernels.

    Attributes:
        head_dim, num_kv_heads, page_size: D, K and S.
        groups: G, query heads that share one KV head.
        block: tokens fetched and multiplied together.
        stages: blocks in shared memory at once.
        scores: factor, window and cap, without sinks.
        interpret: parameters of the simulator, None to compile the kernel.
    """

    head_dim: int
    num_kv_heads: int
    groups: int
    page_size: int
    block: int
    stages: int
    scores: Scores
    interpret: Any

    @property
    def pages_per_block(self) -> int:
        """Number of copies for K of one block; V needs as many."""
        return max(1, self.block // self.page_size)

    def smem(self, *shape: int) -> Any:
        """Shared memory of bf16 in the layout of wgmma and TMA: tiles of 8 rows.

        The width of a tile is the greatest divisor of the head dim and 64.
        """
        width = math.gcd(self.head_dim, 64)
        transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)  # type: ignore[abstract]
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


class Pipeline(NamedTuple):
    """Slots in shared memory for K and V, and the barriers that guard them."""

    k: Ref  # [stages, block, D]
    v: Ref
    k_ready: Ref  # barriers, one for each slot
    v_ready: Ref
    k_free: Ref
    v_free: Ref
    q_ready: Ref  # one for each consumer
    q_free: Ref


def pipeline_scratch(shape: HopperShape, consumers: int, *, sharing: int) -> list[Any]:
    """Scratch for the fields of `Pipeline`, in order. `sharing` is the number of consumers that multiply each block."""
    copies = plgpu.Barrier(num_arrivals=shape.pages_per_block, num_barriers=shape.stages)
    freed = plgpu.Barrier(num_arrivals=sharing, num_barriers=shape.stages)
    buffer = shape.smem(shape.stages, shape.block, shape.head_dim)
    q_ready = plgpu.Barrier(num_barriers=consumers)
    return [
        buffer,
        buffer,
        copies,
        copies,
        freed,
        freed,
        q_ready,
        plgpu.Barrier(num_arrivals=consumers),
    ]


def produce(
    shape: HopperShape,
    pipeline: Pipeline,
    pages: tuple[Ref, Ref],
    item: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    fetch_q: Callable[[], None],
    is_first: jax.Array,
    step: jax.Array,
) -> jax.Array:
    """Fetch the blocks and the queries of one item.

    Args:
        shape: parameters of the kernel.
        pipeline: slots for the blocks.
        pages: pages of the KV cache, and the page table.
        item: row, KV head, first token (a multiple of `block`) and end.
        fetch_q: starts the copy of the queries.
        is_first: true for the first item: there are no older queries in use.
        step: number of blocks fetched before by this thread block.

    Returns:
        `step` after this item.
    """
    kv, table = pages
    row, head, first, end = item
    count = lax.div(end - first + (shape.block - 1), shape.block)
    last_page = lax.div(end - 1, shape.page_size)
    # Queries come last: their buffer is free only after the consumers have loaded the queries of the item before.
    with_q = jnp.minimum(count, shape.stages - 1) - 1

    def fetch(index: jax.Array, step: jax.Array) -> jax.Array:
        slot = lax.rem(step, shape.stages)
        token = first + index * shape.block
        page = lax.div(token, shape.page_size)
        offset: jax.Array | int = 0
        if shape.page_size > shape.block:
            offset = pl.multiple_of(lax.rem(token, shape.page_size), shape.block)
        # There may be no page past the context: the last page is fetched again and masked.
        ids = [table[row, jnp.minimum(page + i, last_page)] for i in range(shape.pages_per_block)]
        for part, (buffer, ready, free) in enumerate(
            (
                (pipeline.k, pipeline.k_ready, pipeline.k_free),
                (pipeline.v, pipeline.v_ready, pipeline.v_free),
            )
        ):

            @pl.when(step >= shape.stages)
            def _wait(free: Ref = free) -> None:
                plgpu.barrier_wait(free.at[slot])

            column = pl.multiple_of((2 * head + part) * shape.head_dim, 16)
            size = min(shape.block, shape.page_size)
            for i, page_id in enumerate(ids):
                box = kv.at[page_id, pl.ds(offset, size), pl.ds(column, shape.head_dim)]
                plgpu.copy_gmem_to_smem(box, buffer.at[slot, pl.ds(i * size, size)], ready.at[slot])

        @pl.when(index == with_q)
        def _queries() -> None:
            @pl.when(jnp.logical_not(is_first))
            def _wait() -> None:
                plgpu.barrier_wait(pipeline.q_free)

            fetch_q()

        return step + 1

    return lax.fori_loop(0, count, fetch, step)


class HopperSoftmax(NamedTuple):
    """Online softmax of 64 rows, in registers: running maximum (of base 2 scores), denominator, weighted values."""

    top: Float[Array, " 64"]
    denominator: Float[Array, " 64"]
    values: Float[Array, "64 D"]


def empty_softmax(shape: HopperShape) -> HopperSoftmax:
    """The softmax of no tokens."""
    return HopperSoftmax(full(MASKED, ROWS), full(0.0, ROWS), full(0.0, ROWS, shape.head_dim))


def full(value: float, *size: int) -> jax.Array:
    """A constant in the register layout of a wgmma's result, or of one number per row of it."""
    layout = plgpu.Layout.WGMMA if len(size) == 2 else plgpu.Layout.WGMMA.reduce(1)
    constant: jax.Array = plgpu.layout_cast(jnp.full(size, value, jnp.float32), layout)
    return constant


def across(rows: Float[Array, " 64"], like: jax.Array) -> jax.Array:
    """Repeat the number of each row in every column."""
    return lax.broadcast_in_dim(rows, like.shape, [0])


def scores_of(shape: HopperShape, q: Ref | jax.Array, k: Ref) -> Float[Array, "64 C"]:
    """Scores in base 2, so that weights are `exp2` of them.

    Args:
        shape: parameters of the kernel.
        q: [64, D], in shared memory or registers.
        k: [C, D].
    """
    scores = _multiply_queries(shape, q, k)
    scale = shape.scores.scale
    cap = shape.scores.soft_cap
    if cap is None:
        return scores * (scale * _LOG2E)
    # By `approx_math` this is the instruction tanh.approx, exact to 2**-11 of the cap: 0.02 of a score at a cap of 50.
    return jnp.tanh(scores * (scale / cap)) * (cap * _LOG2E)


def _multiply_queries(shape: HopperShape, q: Ref | jax.Array, k: Ref) -> Float[Array, "64 C"]:
    if shape.interpret is not None and isinstance(
        q, jax.Array
    ):  # the simulator has no wgmma with a factor in registers
        return jnp.dot(q, k[...].T, preferred_element_type=jnp.float32)

    def multiply(accumulator: Ref) -> jax.Array:
        plgpu.wgmma(accumulator, q, k.transpose((1, 0)))
        return accumulator[...]

    scores: jax.Array = pl.run_scoped(
        multiply, plgpu.WGMMAAccumulatorRef((ROWS, shape.block), jnp.float32)
    )
    return scores


def add_values(
    shape: HopperShape, state: HopperSoftmax, weights: Float[Array, "64 C"], v: Ref
) -> HopperSoftmax:
    """Add `weights @ v` to the values of the state. The wgmma accumulates in the registers that hold them."""
    if shape.interpret is not None:  # the simulator has no wgmma with a factor in registers
        added = jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
        return state._replace(values=state.values + added)
    multiply = pl.run_state(lambda values: plgpu.wgmma(values, weights, v))
    return state._replace(values=multiply(plgpu.WGMMAAccumulatorRef.init(state.values)))


def iota(shape: HopperShape, axis: int) -> Int[Array, "64 C"]:
    """The row or column number of each score, in the register layout of scores."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, shape.block), axis, layout=plgpu.Layout.WGMMA)


def add_weights(
    state: HopperSoftmax, scores: Float[Array, "64 C"]
) -> tuple[HopperSoftmax, Float[Array, "64 C"]]:
    """Add the weights of a block to the denominator and rescale the values. Returns the state and the bf16 weights."""
    top = jnp.maximum(state.top, scores.max(axis=1))
    weights = jnp.exp2(scores - across(top, scores))
    shrink = jnp.exp2(state.top - top)
    denominator = state.denominator * shrink + weights.sum(axis=1)
    state = HopperSoftmax(top, denominator, state.values * across(shrink, state.values))
    return state, weights.astype(jnp.bfloat16)


def silence(shape: HopperShape, v: Ref, begin: jax.Array | None, end: jax.Array) -> None:
    """Overwrite V of slots before `begin` and from `end` on with zeros: NaN times a weight of zero is NaN."""
    for start in range(0, shape.block, ROWS):
        place = v.at[pl.ds(start, ROWS)]
        tokens = plgpu.broadcasted_iota(
            jnp.int32, (ROWS, shape.head_dim), 0, layout=plgpu.Layout.WGMMA
        )
        values = plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False)
        is_seen = tokens + start < end
        if begin is not None:
            is_seen = is_seen & (tokens + start >= begin)
        place[...] = jnp.where(is_seen, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def launcher(
    kernel: Callable[..., None],
    results: tuple[jax.ShapeDtypeStruct, ...],
    scratch: list[Any],
    grid: dict[str, int],
    warpgroups: int,
    interpret: Any,
) -> Callable[..., tuple[jax.Array, ...]]:
    """Turn a kernel into a function of arrays that returns `results`.

    Args:
        kernel: takes references to arguments, results and `scratch`, in this order.
        results: shapes of the results.
        scratch: shared memory and barriers of a thread block.
        grid: names and sizes of the axes of the grid.
        warpgroups: number of warpgroups in a thread block, numbered by the axis "warpgroup".
        interpret: the field of `HopperShape`.
    """
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
