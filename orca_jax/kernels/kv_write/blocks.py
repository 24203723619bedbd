"""New tokens of head-major pages: requests with one token first, a slot each; then the others, one page at a time."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from orca_jax.kernels.kv_pages import HeadMajorPages, KVPages, RowArrays, stored_tokens


def refusal(pages: KVPages) -> str | None:
    """The reason why these pages cannot be written, or None if they can."""
    return None if isinstance(pages, HeadMajorPages) else "writes head-major pages"


def write(pages: HeadMajorPages, k: Array, v: Array | None, requests: RowArrays) -> HeadMajorPages:
    """Write the stored form of each token, with its scales if pages are quantised."""
    page_table, query_start, query_len, context_len = requests
    size = pages.page_size
    pools, structure = jax.tree.flatten(pages)  # [N, K, (D,) S]
    new = stored_tokens(pages, k, v)

    def increment(row: jax.Array, pools: list[Array]) -> list[Array]:
        page = page_table[row, (context_len[row] - 1) // size]
        slot = (context_len[row] - 1) % size

        def put(pool: Array, tokens: Array) -> Array:
            token = lax.dynamic_index_in_dim(tokens, query_start[row])[..., None]
            return lax.dynamic_update_slice(pool, token, (page, *([0] * (pool.ndim - 2)), slot))

        return [put(pool, tokens) for pool, tokens in zip(pools, new, strict=True)]

    pools = lax.fori_loop(0, jnp.sum(query_len == 1), increment, pools)
    if k.shape[0] == 1:
        return jax.tree.unflatten(structure, pools)
    # The slice of tokens for a partly filled page may begin before the first token and end past the last.
    padded = [jnp.pad(tokens, [(size, size), *[(0, 0)] * (tokens.ndim - 1)]) for tokens in new]

    def chunk(row: jax.Array, pools: list[Array]) -> list[Array]:
        first = context_len[row] - query_len[row]
        end = context_len[row]

        def merge_page(index: jax.Array, pools: list[Array]) -> list[Array]:
            position = index * size + jnp.arange(size, dtype=jnp.int32)
            is_new = (position >= first) & (position < end)
            page = page_table[row, index]
            start = size + query_start[row] + index * size - first

            def merge(pool: Array, tokens: Array) -> Array:
                of_page = jnp.moveaxis(lax.dynamic_slice_in_dim(tokens, start, size), 0, -1)
                old = lax.dynamic_index_in_dim(pool, page, keepdims=False)
                return lax.dynamic_update_index_in_dim(
                    pool, jnp.where(is_new, of_page, old), page, axis=0
                )

            return [merge(pool, tokens) for pool, tokens in zip(pools, padded, strict=True)]

        return lax.fori_loop(first // size, (end + size - 1) // size, merge_page, pools)

    pools = lax.fori_loop(jnp.sum(query_len == 1), jnp.sum(query_len > 0), chunk, pools)
    return jax.tree.unflatten(structure, pools)
