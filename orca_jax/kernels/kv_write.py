"""Write the keys and values of this iteration's tokens to their pages.

Two implementations, chosen by name. `scatter` is the oracle and the default of accelerators. `blocks` is for CPUs,
where XLA scatters an element at a time: an increment writes one column of a page, a chunk of a prompt page after
page.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages


def write_kv(
    pages: KVPages,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    implementation: str | None = None,
) -> KVPages:
    """The pages with the new tokens in them. Requests are described as for `ragged_attention`; padding is not written.

    Args:
        pages: to be updated; donated by the caller, so that the update is in place.
        k: new keys of all requests, flattened.
        v: new values.
        page_table: pages of each request, as indices into `pages`.
        query_start: first token of each request in `k` and `v`.
        query_len: number of new tokens; 0 for rows without a request.
        context_len: tokens in the cache after this iteration; the new ones are the last.
        implementation: "scatter" or "blocks"; None takes the backend's default.

    Raises:
        NotImplementedError: there is no such implementation.
    """
    name = implementation or ("blocks" if jax.default_backend() == "cpu" else "scatter")
    if name not in _IMPLEMENTATIONS:
        raise NotImplementedError(f"no implementation {name!r} of write_kv; there are {', '.join(_IMPLEMENTATIONS)}")
    return _IMPLEMENTATIONS[name](pages, k, v, page_table, query_start, query_len, context_len)


def _scatter(
    pages: KVPages, k: Array, v: Array, page_table: Array, query_start: Array, query_len: Array, context_len: Array
) -> KVPages:
    """Every token to its slot at once. A padding token's page does not exist, and its write is dropped."""
    token = jnp.arange(k.shape[0], dtype=jnp.int32)
    past = (token[:, None] >= query_start + query_len) & (query_len > 0)
    request = past.sum(axis=1, dtype=jnp.int32)  # requests that end before this token
    row = jnp.minimum(request, query_len.shape[0] - 1)
    exists = (request < query_len.shape[0]) & (query_len[row] > 0)
    position = (context_len - query_len)[row] + token - query_start[row]
    page = page_table[row, jnp.where(exists, position // pages.page_size, 0)]
    page = jnp.where(exists, page, pages.k.shape[0] + token)  # unique, as all slots are
    place = position % pages.page_size

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[page, :, :, place].set(new.astype(old.dtype), mode="drop", unique_indices=True)

    return KVPages(put(pages.k, k), put(pages.v, v))


def _blocks(
    pages: KVPages, k: Array, v: Array, page_table: Array, query_start: Array, query_len: Array, context_len: Array
) -> KVPages:
    """Requests with one token first, a column each; then the others, a page at a time."""
    size = pages.page_size
    num_increments = jnp.sum(query_len == 1)
    num_requests = jnp.sum(query_len > 0)

    def increment(row: jax.Array, pages: KVPages) -> KVPages:
        page, place = page_table[row, (context_len[row] - 1) // size], (context_len[row] - 1) % size

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            column = lax.dynamic_index_in_dim(new, query_start[row]).astype(old.dtype)[..., None]
            return lax.dynamic_update_slice(old, column, (page, 0, 0, place))

        return KVPages(put(pages.k, k), put(pages.v, v))

    pages = lax.fori_loop(0, num_increments, increment, pages)
    if k.shape[0] == 1:
        return pages
    # The tokens of a page that a request fills in part reach before its first and past its last.
    around = [(size, size), (0, 0), (0, 0)]
    padded = jnp.pad(k, around), jnp.pad(v, around)

    def chunk(row: jax.Array, pages: KVPages) -> KVPages:
        first, end = context_len[row] - query_len[row], context_len[row]

        def write_page(index: jax.Array, pages: KVPages) -> KVPages:
            position = index * size + jnp.arange(size, dtype=jnp.int32)
            is_new = (position >= first) & (position < end)
            page = page_table[row, index]
            start = size + query_start[row] + index * size - first

            def put(old: jax.Array, new: jax.Array) -> jax.Array:
                tokens = lax.dynamic_slice_in_dim(new, start, size).astype(old.dtype).transpose(1, 2, 0)
                merged = jnp.where(is_new, tokens, lax.dynamic_index_in_dim(old, page, keepdims=False))
                return lax.dynamic_update_index_in_dim(old, merged, page, axis=0)

            return KVPages(put(pages.k, padded[0]), put(pages.v, padded[1]))

        return lax.fori_loop(first // size, (end + size - 1) // size, write_page, pages)

    return lax.fori_loop(num_increments, num_requests, chunk, pages)


_IMPLEMENTATIONS: dict[str, Callable[..., KVPages]] = {"scatter": _scatter, "blocks": _blocks}
