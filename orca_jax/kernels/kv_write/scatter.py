"""The oracle of `write_kv`: a scatter of all tokens at once, in plain XLA."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from orca_jax.kernels.kv_pages import HeadMajorPages, KVPages, RowArrays, TokenMajorPages, slots


def refusal(pages: KVPages) -> str | None:
    """The reason why these pages cannot be written, or None if they can."""
    if pages.is_quantised:
        return "writes pages that are not quantised; 'blocks' and 'pages' write all"
    return None


def write(pages: KVPages, k: Array, v: Array | None, requests: RowArrays) -> KVPages:
    """Write all tokens at once, each to its slot. Padding gets a page out of range, so that its write is dropped."""
    page_table, query_start, query_len, context_len = requests
    token = jnp.arange(k.shape[0], dtype=jnp.int32)
    past = (token[:, None] >= query_start + query_len) & (query_len > 0)
    request = past.sum(axis=1, dtype=jnp.int32)  # requests that end before this token
    row = jnp.minimum(request, query_len.shape[0] - 1)
    exists = (request < query_len.shape[0]) & (query_len[row] > 0)
    position = (context_len - query_len)[row] + token - query_start[row]
    page = page_table[row, jnp.where(exists, position // pages.page_size, 0)]
    num_pages = pages.k.shape[0] if isinstance(pages, HeadMajorPages) else pages.kv.shape[0]
    page = jnp.where(exists, page, num_pages + token)  # unique, like all other slots
    slot = position % pages.page_size

    if isinstance(pages, TokenMajorPages):
        assert v is not None, "token-major pages have values"
        return TokenMajorPages(
            pages.kv.at[page, slot].set(slots(k, v, pages.dtype), mode="drop", unique_indices=True)
        )

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[page, :, :, slot].set(new.astype(old.dtype), mode="drop", unique_indices=True)

    if pages.v is None or v is None:
        return HeadMajorPages(put(pages.k, k), None)
    return HeadMajorPages(put(pages.k, k), put(pages.v, v))
