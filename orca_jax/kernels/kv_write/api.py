"""Write the keys and values of an iteration's tokens to their pages.

There are four implementations, chosen by name:

    scatter  the oracle, and the default of packed pages (`scatter.py`)
    tpu      for TPUs: a scatter for increments and a kernel for chunks (`tpu.py`); for quantised pages a kernel
             with the fewest possible rewrites (`tpu_quantised.py`)
    blocks   for CPUs, since XLA scatters one element at a time there: an increment writes one column of a page, a
             chunk writes page after page
    pages    for GPUs and quantised pages, and for pages without values on accelerators: all pages at once, since a GPU
             waits for its host at every pass of a loop with a dynamic trip count, and a TPU would copy all pages in
             order to write columns

Quantised pages: a token of a head-major page has its own scales, and is written like any other. In a packed page, a
token larger than all before it changes the scale, and with it the stored values. So these pages are written whole.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from orca_jax.kernels.backend import Backend, named_backend
from orca_jax.kernels.kv_pages import (
    HeadMajorPages,
    KVPages,
    PackedPages,
    RowArrays,
    as_bytes,
    page_scales,
    quantise_tokens,
    read_page,
    slots,
    write_page,
    write_pages,
)
from orca_jax.kernels.kv_write.pieces import cut
from orca_jax.kernels.kv_write.scatter import scatter


def write_kv(
    pages: KVPages,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"] | None,
    requests: RowArrays,
    *,
    implementation: str | None = None,
) -> KVPages:
    """Write new tokens to their pages, and return the pages. Padding is not written.

    Args:
        pages: pages to update; donated by the caller, so that the update is in place.
        k: new keys of all requests, flattened.
        v: new values; None for pages without values.
        requests: the requests, with indices into `pages`.
        implementation: "scatter", "tpu", "blocks" or "pages"; None takes the default for the layout and type.

    Raises:
        NotImplementedError: the implementation does not exist, or cannot write these pages.
    """
    assert (v is None) == (isinstance(pages, HeadMajorPages) and pages.v is None), "values, or pages without them"
    by_default = "blocks" if isinstance(pages, HeadMajorPages) else "pages" if pages.is_quantised else "scatter"
    name = implementation or by_default
    if name in _PLAIN:
        return _PLAIN[name](pages, k, v, requests)
    backend = named_backend(BACKENDS, name)
    if backend is None:
        known = [*_PLAIN, *(backend.name for backend in BACKENDS)]
        raise NotImplementedError(f"write_kv has no implementation {name!r}; use one of {', '.join(known)}")
    written: KVPages = backend.load().write(pages, k, v, requests)
    return written


def _pages(pages: KVPages, k: Array, v: Array | None, requests: RowArrays) -> KVPages:
    """Read all pages with new tokens, merge these in, and write the pages together. Invalid pieces are dropped."""
    if isinstance(pages, HeadMajorPages):
        return _whole_head_major(pages, k, v, requests)
    if pages.scale is None or v is None:
        raise NotImplementedError("write_kv 'pages' writes packed pages that are quantised")
    num_tokens, _, head_dim = k.shape
    count, pieces = cut(pages.page_size, num_tokens, requests)
    slot = jnp.arange(pages.page_size, dtype=jnp.int32)
    token = jnp.clip(pieces.token[:, None] + slot, 0, num_tokens - 1)  # [M, S]
    is_old = slot < pieces.begin[:, None]
    is_new = ~is_old & (slot < pieces.end[:, None])
    has_old = is_old[:, :1]
    merged, least = [], []
    old = jax.vmap(lambda page: read_page(pages, page, head_dim))(pieces.page)
    for part, (new, kept) in enumerate(zip((k, v), old, strict=True)):
        tokens = new[token].astype(jnp.float32).transpose(0, 2, 3, 1)  # [M, K, D, S]
        # Unwritten slots may hold any value, which must not influence a scale.
        kept = jnp.where(is_old[:, None, None], kept, 0.0)
        merged.append(jnp.where(is_new[:, None, None], tokens, kept))
        least.append(jnp.where(has_old, pages.scale[pieces.page, 0, part::2], 0.0))
    piece = jnp.arange(pieces.page.shape[0], dtype=jnp.int32)
    page = jnp.where(piece < count, pieces.page, pages.kv.shape[0] + piece)  # unique, like all other pages
    return write_pages(pages, page, (merged[0], merged[1]), (least[0], least[1]))


def _whole_head_major(pages: HeadMajorPages, k: Array, v: Array | None, requests: RowArrays) -> HeadMajorPages:
    count, pieces = cut(pages.page_size, k.shape[0], requests)
    slot, piece = (jnp.arange(size, dtype=jnp.int32) for size in (pages.page_size, pieces.page.shape[0]))
    token = jnp.clip(pieces.token[:, None] + slot, 0, k.shape[0] - 1)  # [M, S]
    is_new = (slot >= pieces.begin[:, None]) & (slot < pieces.end[:, None])
    page = jnp.where(piece < count, pieces.page, pages.k.shape[0] + piece)  # unique, like all other pages

    def put(pool: Array, tokens: Array) -> Array:
        new = jnp.moveaxis(tokens[token], 1, -1)  # [M, K, (D,) S]
        merged = jnp.where(is_new.reshape(len(piece), *[1] * (new.ndim - 2), -1), new, pool[pieces.page])
        return pool.at[page].set(merged, mode="drop", unique_indices=True)

    pools, structure = jax.tree.flatten(pages)
    written = [put(pool, tokens) for pool, tokens in zip(pools, _stored(pages, k, v), strict=True)]
    return jax.tree.unflatten(structure, written)


def _stored(pages: HeadMajorPages, k: Array, v: Array | None) -> list[Array]:
    """What each pool stores of all tokens: [T, K, D], and scales [T, K] of quantised ones."""
    parts = [k] if v is None else [k, v]
    if not pages.is_quantised:
        return [tokens.astype(pages.dtype) for tokens in parts]
    values, scales = zip(*(quantise_tokens(tokens, pages.dtype) for tokens in parts), strict=True)
    return [*map(as_bytes, values), *scales]


def _blocks(pages: KVPages, k: Array, v: Array | None, requests: RowArrays) -> KVPages:
    """Write requests with one token first, a slot each; then the other requests, one page at a time."""
    write = _head_major if isinstance(pages, HeadMajorPages) else _packed
    written: KVPages = write(pages, k, v, requests)  # type: ignore[arg-type]
    return written


def _head_major(pages: HeadMajorPages, k: Array, v: Array | None, requests: RowArrays) -> HeadMajorPages:
    """Write the stored form of each token, with its scales if pages are quantised."""
    page_table, query_start, query_len, context_len = requests
    size = pages.page_size
    pools, structure = jax.tree.flatten(pages)  # [N, K, (D,) S]
    new = _stored(pages, k, v)

    def increment(row: jax.Array, pools: list[Array]) -> list[Array]:
        page, slot = page_table[row, (context_len[row] - 1) // size], (context_len[row] - 1) % size

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

    pools = lax.fori_loop(jnp.sum(query_len == 1), jnp.sum(query_len > 0), chunk, pools)
    return jax.tree.unflatten(structure, pools)


def _packed(pages: PackedPages, k: Array, v: Array, requests: RowArrays) -> PackedPages:
    """Write slots of packed pages; quantised ones are read and written whole."""
    page_table, query_start, query_len, context_len = requests
    size, head_dim = pages.page_size, k.shape[2]
    num_increments = jnp.sum(query_len == 1)
    num_requests = jnp.sum(query_len > 0)
    if not pages.is_quantised:
        pages = _write_slots(pages, k, v, requests, num_increments)
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


def _write_slots(pages: PackedPages, k: Array, v: Array, requests: RowArrays, num_increments: Array) -> PackedPages:
    """Write the token of each of the first rows."""
    page_table, query_start, _, context_len = requests
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


BACKENDS = (Backend("tpu", "orca_jax.kernels.kv_write.tpu", "tpu"),)
"""Kernels of single platforms, by name. A module has `refusal(pages)` and `write(...)`."""

_PLAIN: dict[str, Callable[..., KVPages]] = {"scatter": scatter, "blocks": _blocks, "pages": _pages}
"""The implementations for all platforms, in plain XLA."""
