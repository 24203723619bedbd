"""What the kernels for Hopper share: how K and V reach registers, and the softmax that goes over them.

A thread block is a producer warpgroup, which only asks TMA for blocks, and two consumer warpgroups, which only wait and
multiply. Between them a block goes through one of `stages` places in shared memory:

    page [S, W]   one head's K and V are two column ranges          place s of `stages`
                  [K D][V D]  [K D][V D]  ...
                   |    |
                   |    +-- box [block, D] -- TMA -->  v[s]  -- v_ready[s] -->  consumers multiply  -- v_free[s] --+
                   +------- box [block, D] -- TMA -->  k[s]  -- k_ready[s] -->  consumers multiply  -- k_free[s] --+
                                                        ^                                                          |
                                                        +------------------ the producer's next block <------------+

The producer's loop owns the blocks of one item (`produce`): it waits until a place is free, fetches, and goes on with
the next item's blocks without a pause, so that places stay full where one item ends and another begins. Consumers
own 64 rows each, which is what wgmma multiplies; scores, maxima, sums and weighted values are float32 and stay in their
registers (`HopperSoftmax`) from an item's first block to its last.

Slots that no request wrote may hold NaN: their scores are masked, and their V is overwritten by zeros in shared
memory (`silence`), which only the last block of a context needs.
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

from orca_jax.kernels.ragged_attention.gpu_plan import ROWS

MASKED = -1e30  # finite: a fully masked block must not make NaN out of inf - inf
_LOG2E = math.log2(math.e)

Ref = Any  # Pallas has no public type for references


@dataclass(frozen=True)
class HopperShape:
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
        """Shared memory of bf16 as wgmma and TMA want it: in tiles of 8 rows, as wide as divides a head."""
        width = math.gcd(self.head_dim, 64)
        transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)  # type: ignore[abstract]
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms)


class Pipeline(NamedTuple):
    """The places in shared memory that K and V go through, and what says when."""

    k: Ref  # [stages, block, D]
    v: Ref
    k_ready: Ref  # barriers, one for each stage
    v_ready: Ref
    k_free: Ref
    v_free: Ref
    q_ready: Ref  # one for each consumer
    q_free: Ref


def pipeline_scratch(shape: HopperShape, consumers: int, *, sharing: int) -> list[Any]:
    """Scratch for `Pipeline`, in its order; `sharing` of the consumers multiply each block."""
    copies = plgpu.Barrier(num_arrivals=shape.pages_per_block, num_barriers=shape.stages)
    freed = plgpu.Barrier(num_arrivals=sharing, num_barriers=shape.stages)
    buffer = shape.smem(shape.stages, shape.block, shape.head_dim)
    q_ready = plgpu.Barrier(num_barriers=consumers)
    return [buffer, buffer, copies, copies, freed, freed, q_ready, plgpu.Barrier(num_arrivals=consumers)]


def produce(
    shape: HopperShape,
    pipeline: Pipeline,
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
        for part, (buffer, ready, free) in enumerate(
            ((pipeline.k, pipeline.k_ready, pipeline.k_free), (pipeline.v, pipeline.v_ready, pipeline.v_free))
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
    """Online softmax of 64 rows, in registers: running maximum (of scores in bits), denominator, weighted values."""

    top: Float[Array, " 64"]
    denominator: Float[Array, " 64"]
    values: Float[Array, "64 D"]


def empty_softmax(shape: HopperShape) -> HopperSoftmax:
    """Of no tokens yet."""
    return HopperSoftmax(full(MASKED, ROWS), full(0.0, ROWS), full(0.0, ROWS, shape.head_dim))


def full(value: float, *size: int) -> jax.Array:
    """A constant in the registers of a wgmma's result, or one number for each of its rows."""
    layout = plgpu.Layout.WGMMA if len(size) == 2 else plgpu.Layout.WGMMA.reduce(1)
    constant: jax.Array = plgpu.layout_cast(jnp.full(size, value, jnp.float32), layout)
    return constant


def across(rows: Float[Array, " 64"], like: jax.Array) -> jax.Array:
    """A number for each row, in every column."""
    return lax.broadcast_in_dim(rows, like.shape, [0])


def scores_of(shape: HopperShape, q: Ref | jax.Array, k: Ref) -> Float[Array, "64 C"]:
    """Scores in bits (base 2 logarithms), so that `exp2` is all that is left to do.

    Args:
        shape: of the kernel.
        q: [64, D], in shared memory or registers.
        k: [C, D].
    """
    scores = _multiply_queries(shape, q, k)
    if shape.soft_cap is None:
        return scores * (shape.scale * _LOG2E)
    return jnp.tanh(scores * (shape.scale / shape.soft_cap)) * (shape.soft_cap * _LOG2E)


def _multiply_queries(shape: HopperShape, q: Ref | jax.Array, k: Ref) -> Float[Array, "64 C"]:
    if shape.interpret is not None and isinstance(
        q, jax.Array
    ):  # the simulator has no wgmma with a factor in registers
        return jnp.dot(q, k[...].T, preferred_element_type=jnp.float32)

    def multiply(accumulator: Ref) -> jax.Array:
        plgpu.wgmma(accumulator, q, k.transpose((1, 0)))
        return accumulator[...]

    scores: jax.Array = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, shape.block), jnp.float32))
    return scores


def add_values(shape: HopperShape, state: HopperSoftmax, weights: Float[Array, "64 C"], v: Ref) -> HopperSoftmax:
    """The state with `weights @ v` added to its values, by wgmma itself, in the registers where they are."""
    if shape.interpret is not None:  # likewise
        added = jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
        return state._replace(values=state.values + added)
    multiply = pl.run_state(lambda values: plgpu.wgmma(values, weights, v))
    return state._replace(values=multiply(plgpu.WGMMAAccumulatorRef.init(state.values)))


def iota(shape: HopperShape, axis: int) -> Int[Array, "64 C"]:
    """Each score's row or column, in the registers that hold scores."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, shape.block), axis, layout=plgpu.Layout.WGMMA)


def add_weights(state: HopperSoftmax, scores: Float[Array, "64 C"]) -> tuple[HopperSoftmax, Float[Array, "64 C"]]:
    """The state with a block's weights in its denominator and its values shrunk; and the weights in bf16."""
    top = jnp.maximum(state.top, scores.max(axis=1))
    weights = jnp.exp2(scores - across(top, scores))
    shrink = jnp.exp2(state.top - top)
    denominator = state.denominator * shrink + weights.sum(axis=1)
    state = HopperSoftmax(top, denominator, state.values * across(shrink, state.values))
    return state, weights.astype(jnp.bfloat16)


def silence(shape: HopperShape, v: Ref, written: jax.Array) -> None:
    """Overwrite the V of slots that nobody wrote by zeros: a weight of zero does not silence NaN."""
    for start in range(0, shape.block, ROWS):
        place = v.at[pl.ds(start, ROWS)]
        tokens = plgpu.broadcasted_iota(jnp.int32, (ROWS, shape.head_dim), 0, layout=plgpu.Layout.WGMMA)
        values = plgpu.load(place, layout=plgpu.Layout.WGMMA, optimized=False)
        place[...] = jnp.where(tokens + start < written, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def launcher(
    kernel: Callable[..., None],
    results: tuple[jax.ShapeDtypeStruct, ...],
    scratch: list[Any],
    grid: dict[str, int],
    warpgroups: int,
    interpret: Any,
) -> Callable[..., tuple[jax.Array, ...]]:
    """The kernel as a function of arrays, which returns `results`.

    Args:
        kernel: gets references to arguments, results and `scratch`, in this order.
        results: shapes.
        scratch: shared memory and barriers of a thread block.
        grid: names and sizes of its axes.
        warpgroups: of a thread block; the axis "warpgroup" tells them apart.
        interpret: as for `HopperShape`.
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
