"""Searches in rows of numbers without a loop, a branch, or a sort of all columns."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from orca_jax.model.sharding import VOCAB_BLOCK

_SMALL_BLOCK = 8  # columns
_STEP_BITS = 4  # of a threshold in a pass


def threshold_in_passes(
    rows: tuple[int, ...], are_enough: Callable[[list[Int[Array, " B"]]], Bool[Array, "S B"]]
) -> Int[Array, " B"]:
    """The largest rank of each row that is enough, four bits at a time: XLA fuses the 15 sums of a pass."""
    low = jnp.full(rows, jnp.iinfo(jnp.int32).min)
    for shift in range(32 - _STEP_BITS, -1, -_STEP_BITS):
        steps = range(1, 1 << _STEP_BITS)
        ranks = [low + jnp.uint32(step << shift).astype(jnp.int32) for step in steps]
        low = low + (are_enough(ranks).sum(axis=0, dtype=jnp.int32) << shift)
    return low


def largest(
    values: Float[Array, "B N"], count: int
) -> tuple[Float[Array, "B C"], Int[Array, "B C"]]:
    """The result of `lax.top_k` without a sort of all columns.

    The C largest numbers lie in the C blocks of columns with the largest maxima, which have smaller blocks again.
    """
    columns = jnp.broadcast_to(jnp.arange(values.shape[1], dtype=jnp.int32), values.shape)
    for size in (VOCAB_BLOCK, _SMALL_BLOCK):
        if count * size >= values.shape[1]:
            continue
        shape = values.shape[0], -1, size
        blocks = values.reshape(shape)
        chosen = lax.top_k(blocks.max(axis=-1), count)[1]
        # in the order of columns, of which the first one is taken among equals
        place = jnp.sort(chosen, axis=-1)[:, :, None]
        values, columns = (
            jnp.take_along_axis(each.reshape(shape), place, axis=1).reshape(len(each), -1)
            for each in (values, columns)
        )
    values, place = lax.top_k(values, count)
    return values, jnp.take_along_axis(columns, place, axis=1)
