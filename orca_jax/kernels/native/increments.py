"""New tokens and attention of increments on CPUs by the library (`increments.c`)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import HeadMajorPages, RowArrays
from orca_jax.kernels.native.library import INCREMENTS


def attend_increments(
    queries: Float[Array, "T K M D"],
    pages: HeadMajorPages,
    requests: RowArrays,
    window: Int[Array, ""],
    sinks: Float[Array, " H"] | None = None,
    *,
    soft_cap: float | None,
) -> Float[Array, "T K M D"]:
    """Attention of the requests with one query, on one device; 0 for all other queries.

    Args:
        queries: scaled, for the M query heads of each KV head.
        pages: pages in float32 or bfloat16.
        requests: those with one query come first.
        window: number of tokens that a query sees.
        sinks: as in `Scores`.
        soft_cap: scores s become soft_cap * tanh(s / soft_cap); None leaves them.
    """
    call = jax.ffi.ffi_call(INCREMENTS, jax.ShapeDtypeStruct(queries.shape, jnp.float32))
    rows = *_integers(requests, window), _sinks(queries, sinks)
    out: jax.Array = call(queries.astype(jnp.float32), *pages[:2], *rows, soft_cap=np.float32(soft_cap or 0))
    return out


def write_and_attend_increments(
    queries: Float[Array, "T K M D"],
    new_keys: Float[Array, "B K D"],
    new_values: Float[Array, "B K D"],
    pages: HeadMajorPages,
    requests: RowArrays,
    window: Int[Array, ""],
    sinks: Float[Array, " H"] | None = None,
    *,
    soft_cap: float | None,
) -> tuple[Float[Array, "T K M D"], HeadMajorPages]:
    """Write the new tokens of all requests to their pages, and attend the increments.

    A token of an increment is written when its page is read.

    Args:
        queries: the queries of increments; this and the other arguments are those of `attend_increments`.
        new_keys: the new keys of all requests, flattened like the queries.
        new_values: likewise.
        pages: written in place, as all that is donated.

    Returns:
        The attention, and the pages.
    """
    assert pages.v is not None, "the library refuses pages without values"
    shapes = (jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (pages.k, pages.v))
    call = jax.ffi.ffi_call(
        INCREMENTS, (jax.ShapeDtypeStruct(queries.shape, jnp.float32), *shapes), input_output_aliases={1: 1, 2: 2}
    )
    rows = *_integers(requests, window), _sinks(queries, sinks), requests.query_len.astype(jnp.int32)
    new = (tokens.astype(jnp.float32) for tokens in (new_keys, new_values))
    cap = np.float32(soft_cap or 0)
    out, keys, values = call(queries.astype(jnp.float32), *pages[:2], *rows, *new, soft_cap=cap)
    return out, HeadMajorPages(keys, values)


def _integers(requests: RowArrays, window: Int[Array, ""]) -> list[Array]:
    """The integers of a call: the page table, first queries, contexts, the number of increments, and the window."""
    table, start, length, context = requests
    return [array.astype(jnp.int32) for array in (table, start, context, jnp.sum(length == 1), window)]


def _sinks(queries: Float[Array, "T K M D"], sinks: Float[Array, " H"] | None) -> Float[Array, " H"]:
    """The sinks as the library reads them: without any, numbers that add nothing."""
    number = queries.shape[1] * queries.shape[2]
    return jnp.full(number, jnp.finfo(jnp.float32).min) if sinks is None else sinks.astype(jnp.float32)
