"""New tokens and attention of increments on CPUs by the library (`increments.c`)."""

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
    rows = _integers(page_table, query_start, context_len, count, window)
    out: jax.Array = call(queries.astype(jnp.float32), keys, values, *rows, soft_cap=np.float32(soft_cap or 0))
    return out


def write_and_attend_increments(
    queries: Float[Array, "T K M D"],
    keys: Float[Array, "N K D S"],
    values: Float[Array, "N K D S"],
    new_keys: Float[Array, "B K D"],
    new_values: Float[Array, "B K D"],
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    count: Int[Array, ""],
    *,
    window: Int[Array, ""],
    soft_cap: float | None,
) -> tuple[Float[Array, "T K M D"], Float[Array, "N K D S"], Float[Array, "N K D S"]]:
    """Write the new tokens of all requests to their pages, and attend the increments.

    A token of an increment is written when its page is read.

    Args:
        queries: as for `attend_increments`, and so are the other arguments.
        keys: written in place, as all that is donated.
        values: likewise.
        new_keys: of all requests, flattened like the queries.
        new_values: likewise.
        query_len: number of new tokens; 0 for rows without a request.

    Returns:
        The attention, and the pages.
    """
    shapes = tuple(jax.ShapeDtypeStruct(pages.shape, pages.dtype) for pages in (keys, values))
    call = jax.ffi.ffi_call(
        INCREMENTS, (jax.ShapeDtypeStruct(queries.shape, jnp.float32), *shapes), input_output_aliases={1: 1, 2: 2}
    )
    rows = _integers(page_table, query_start, context_len, count, window, query_len)
    new = (tokens.astype(jnp.float32) for tokens in (new_keys, new_values))
    out, keys, values = call(queries.astype(jnp.float32), keys, values, *rows, *new, soft_cap=np.float32(soft_cap or 0))
    return out, keys, values


def _integers(*arrays: Array) -> list[Array]:
    return [array.astype(jnp.int32) for array in arrays]
