"""Attention of increments on CPUs by the library (`increments.c`)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from orca_jax.kernels.native.library import INCREMENTS


def attend_increments(
    queries: Float[Array, "T K M D"],
    keys: Float[Array, "N K D S"],
    values: Float[Array, "N K D S"],
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    context_len: Int[Array, " R"],
    count: Int[Array, ""],
    *,
    window: Int[Array, ""],
    soft_cap: float | None,
) -> Float[Array, "T K M D"]:
    """Attention of the requests with one query, on one device; 0 for all other queries.

    Args:
        queries: scaled, for the M query heads of each KV head.
        keys: head-major pages in float32 or bfloat16.
        values: likewise.
        page_table: pages of each request.
        query_start: first query of each request.
        context_len: tokens in the cache of each request.
        count: number of requests with one query, which come first.
        window: number of tokens that a query sees.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap); None leaves them.
    """
    call = jax.ffi.ffi_call(INCREMENTS, jax.ShapeDtypeStruct(queries.shape, jnp.float32))
    arrays = (array.astype(jnp.int32) for array in (page_table, query_start, context_len, count, window))
    out: jax.Array = call(queries.astype(jnp.float32), keys, values, *arrays, soft_cap=np.float32(soft_cap or 0))
    return out
