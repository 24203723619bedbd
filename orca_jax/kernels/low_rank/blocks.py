"""A loop over tiles of tokens with the same slot: for CPUs. Tokens without an adapter cost nothing."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from orca_jax.kernels.low_rank.parts import TILE, Operands, SlotPlan, Sum, split_ranks
from orca_jax.kernels.matmul import matmul


def additions(
    x: Float[Array, "T I"],
    operands: Operands,
    plan: SlotPlan,
    is_active: Bool[Array, ""],
    total: Sum | None,
) -> tuple[Float[Array, "T _"], ...]:
    """The arguments and the result of `api.low_rank`.

    Rows are in the order of slots, those of slot 0 first. The last tile of a slot may reach into the rows of the next
    one: these results have no meaning, and the next slot overwrites them.
    """
    tokens = x.shape[0]
    num_tiles = jnp.where(is_active, plan.num_tiles, 0)
    rows = x[jnp.pad(plan.order, (0, TILE))]
    empty = [jnp.zeros((tokens + TILE, stack.shape[2]), jnp.float32) for stack in operands.expand]

    def matrix(stack: Array, tile: Array) -> Array:
        return lax.dynamic_index_in_dim(
            stack, operands.first + plan.tile_slot[tile], keepdims=False
        )

    def narrow(tile: Array, start: Array) -> Array:
        return matmul(lax.dynamic_slice_in_dim(rows, start, TILE), matrix(operands.shrink, tile))

    def widen(tile: Array, start: Array, h: Array, outs: list[Array]) -> list[Array]:
        parts = zip(split_ranks(h, operands.expand), operands.expand, outs, strict=True)
        return [
            lax.dynamic_update_slice_in_dim(out, matmul(part, matrix(stack, tile)), start, 0)
            for part, stack, out in parts
        ]

    if total is None:

        def both(tile: Int[Array, ""], outs: list[Array]) -> list[Array]:
            start = plan.tile_start[tile]
            return widen(tile, start, narrow(tile, start), outs)

        outs = lax.fori_loop(0, num_tiles, both, empty)
    else:

        def first(tile: Int[Array, ""], h: Array) -> Array:
            start = plan.tile_start[tile]
            return lax.dynamic_update_slice_in_dim(h, narrow(tile, start), start, 0)

        def with_sum() -> list[Array]:
            h = jnp.zeros((tokens + TILE, operands.shrink.shape[2]), jnp.float32)
            summed = total(lax.fori_loop(0, num_tiles, first, h))

            def second(tile: Int[Array, ""], outs: list[Array]) -> list[Array]:
                start = plan.tile_start[tile]
                return widen(tile, start, lax.dynamic_slice_in_dim(summed, start, TILE), outs)

            return lax.fori_loop(0, num_tiles, second, empty)

        # All devices agree, so none waits for a sum that the others leave out.
        outs = lax.cond(is_active, with_sum, lambda: empty)
    return tuple(out[plan.place] for out in outs)
