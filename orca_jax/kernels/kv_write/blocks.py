"""Write requests with one token first, a slot each; then the other requests, one page at a time. For CPUs."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from orca_jax.kernels.kv_pages import (
    HeadMajorPages,
    KVPages,
    PackedPages,
    page_scales,
    quantise_tokens,
    read_page,
    slots,
    write_page,
)


def blocks(
    pages: KVPages, k: Array, v: Array, page_table: Array, query_start: Array, query_len: Array, context_len: Array
) -> KVPages:
    """The implementation "blocks" of `write_kv`."""
    write = _head_major if isinstance(pages, HeadMajorPages) else _packed
    written: KVPages = write(pages, k, v, page_table, query_start, query_len, context_len)  # type: ignore[arg-type]
    return written


def _head_major(
    pages: HeadMajorPages,
    k: Array,
    v: Array,
    page_table: Array,
    query_start: Array,
    query_len: Array,
    context_len: Array,
) -> HeadMajorPages:
    """Write the stored form of each token, with its scales if pages are quantised."""
    size = pages.page_size
    pools = [pool for pool in pages if pool is not None]  # [N, K, (D,) S]
    new = [k.astype(pages.dtype), v.astype(pages.dtype)]  # [T, K(, D)]
    if pages.is_quantised:
        values, scales = zip(*(quantise_tokens(tokens, pages.dtype) for tokens in (k, v)), strict=True)
        new = [*values, *scales]

    def increment(row: jax.Array, pools: list[Array]) -> list[Array]:
        page, slot = page_table[row, (context_len[row] - 1) // size], (context_len[row] - 1) % size

        def put(pool: Array, tokens: Array) -> Array:
            token = lax.dynamic_index_in_dim(tokens, query_start[row])[..., None]
            return lax.dynamic_update_slice(pool, token, (page, *([0] * (pool.ndim - 2)), slot))

        return [put(pool, tokens) for pool, tokens in zip(pools, new, strict=True)]

    pools = lax.fori_loop(0, jnp.sum(query_len == 1), increment, pools)
    if k.shape[0] == 1:
        return HeadMajorPages(*pools)
    # The slice of tokens for a partly filled page may begin before the first token and end past the last.
    padded = [jnp.pad(tokens, [(size, size), *[(0, 0)] * (tokens.ndim - 1)]) for tokens in new]

    def chunk(row: jax.Array, pools: list[Array]) -> list[Array]:
        first, end = context_len[row] - query_len[row], context_len[row]

        def merge_page(index: jax.Array, pools: list[Array]) -> list[Array]:
            position = index * size + jnp.arange(size, dtype=jnp.int32)
            is_new = (position >= first) & (position < end)
            page = page_table[row, index]
            start = size + query_start[row] + index * size - first

            def merge(pool: Array, tokens: Array) -> Array:
                of_page = jnp.moveaxis(lax.dynamic_slice_in_dim(tokens, start, size), 0, -1)
                old = lax.dynamic_index_in_dim(pool, page, keepdims=False)
                return lax.dynamic_update_index_in_dim(pool, jnp.where(is_new, of_page, old), page, axis=0)

            return [merge(pool, tokens) for pool, tokens in zip(pools, padded, strict=True)]

        return lax.fori_loop(first // size, (end + size - 1) // size, merge_page, pools)

    return HeadMajorPages(*lax.fori_loop(jnp.sum(query_len == 1), jnp.sum(query_len > 0), chunk, pools))


def _packed(
    pages: PackedPages, k: Array, v: Array, page_table: Array, query_start: Array, query_len: Array, context_len: Array
) -> PackedPages:
    """Write slots of packed pages; quantised ones are read and written whole."""
    size, head_dim = pages.page_size, k.shape[2]
    num_increments = jnp.sum(query_len == 1)
    num_requests = jnp.sum(query_len > 0)
    if not pages.is_quantised:
        pages = _write_slots(pages, k, v, page_table, query_start, context_len, num_increments)
        if k.shape[0] == 1:
            return pages
    # The slice of tokens for a partly filled page may begin before the first token and end past the last.
    padded = [jnp.pad(new, [(size, size), (0, 0), (0, 0)]) for new in (k, v)]

    def chunk(row: jax.Array, pages: PackedPages) -> PackedPages:
        first, end = context_len[row] - query_len[row], context_len[row]

        def merge_page(index: jax.Array, pages: PackedPages) -> PackedPages:
            position = index * size + jnp.arange(size, dtype=jnp.int32)
            is_new = (position >= first) & (position < end)
            # Unwritten slots may hold any value, which must not influence a scale.
            is_kept = (position < first) | (not pages.is_quantised)
            page = page_table[row, index]
            start = size + query_start[row] + index * size - first

            def merge(new: jax.Array, old: jax.Array) -> jax.Array:
                tokens = lax.dynamic_slice_in_dim(new, start, size).astype(jnp.float32).transpose(1, 2, 0)
                return jnp.where(is_new, tokens, jnp.where(is_kept, old, 0.0))

            k, v = (merge(new, old) for new, old in zip(padded, read_page(pages, page, head_dim), strict=True))
            return write_page(pages, page, k, v, _scales_in_use(pages, page, index * size < first))

        return lax.fori_loop(first // size, (end + size - 1) // size, merge_page, pages)

    return lax.fori_loop(0 if pages.is_quantised else num_increments, num_requests, chunk, pages)


def _write_slots(
    pages: PackedPages,
    k: Array,
    v: Array,
    page_table: Array,
    query_start: Array,
    context_len: Array,
    num_increments: Array,
) -> PackedPages:
    """Write the token of each of the first rows."""
    size = pages.page_size

    def increment(row: jax.Array, pages: PackedPages) -> PackedPages:
        page, slot = page_table[row, (context_len[row] - 1) // size], (context_len[row] - 1) % size
        token_k, token_v = (lax.dynamic_index_in_dim(new, query_start[row]) for new in (k, v))
        token = slots(token_k, token_v, pages.dtype)[:, None]
        return PackedPages(lax.dynamic_update_slice(pages.kv, token, (page, slot, 0)))

    return lax.fori_loop(0, num_increments, increment, pages)


def _scales_in_use(pages: PackedPages, page: Array, has_tokens: Array) -> tuple[Array, Array] | None:
    """The scales of a page, or zeros if it has no tokens yet; None if pages are not quantised."""
    scales = page_scales(pages, page)
    if scales is None:
        return None
    k_scale, v_scale = (jnp.where(has_tokens, scale, 0.0) for scale in scales)
    return k_scale, v_scale
