"""Write the keys and values of an iteration's tokens to their pages.

There are four implementations, chosen by name:

    scatter  the oracle, and the default of packed pages (`scatter.py`)
    tpu      for TPUs: a scatter for increments and a kernel for chunks (`tpu.py`); for quantised pages a kernel
             with the fewest possible rewrites (`tpu_quantised.py`)
    blocks   for CPUs, since XLA scatters one element at a time there: an increment writes one column of a page, a
             chunk writes page after page
    pages    for GPUs and quantised pages: all pages at once, since a GPU waits for its host at every pass of a loop
             with a dynamic trip count

Quantised pages: a token of a head-major page has scales of its own, and is written like any other. In a packed page, a
token larger than all before it changes the scale, and with it the stored values. So such pages are written whole.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.backend import Backend, named_backend
from orca_jax.kernels.kv_pages import HeadMajorPages, KVPages, PackedPages, read_page, write_pages
from orca_jax.kernels.kv_write.blocks import blocks
from orca_jax.kernels.kv_write.pieces import cut
from orca_jax.kernels.kv_write.scatter import scatter


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
    """Write new tokens to their pages, and return the pages. Padding is not written.

    Requests are described as for `ragged_attention`.

    Args:
        pages: pages to update; donated by the caller, so that the update is in place.
        k: new keys of all requests, flattened.
        v: new values.
        page_table: pages of each request, as indices into `pages`.
        query_start: first token of each request in `k` and `v`.
        query_len: number of new tokens; 0 for rows without a request.
        context_len: tokens in the cache after this iteration; the new ones come last.
        implementation: "scatter", "tpu", "blocks" or "pages"; None takes the default for the layout and type.

    Raises:
        NotImplementedError: the implementation does not exist, or cannot write such pages.
    """
    by_default = "blocks" if isinstance(pages, HeadMajorPages) else "pages" if pages.is_quantised else "scatter"
    name = implementation or by_default
    rows = page_table, query_start, query_len, context_len
    if name in _PLAIN:
        return _PLAIN[name](pages, k, v, *rows)
    backend = named_backend(BACKENDS, name)
    if backend is None:
        known = [*_PLAIN, *(backend.name for backend in BACKENDS)]
        raise NotImplementedError(f"write_kv has no implementation {name!r}; use one of {', '.join(known)}")
    written: KVPages = backend.load().write(pages, k, v, *rows)
    return written


def _pages(
    pages: KVPages, k: Array, v: Array, page_table: Array, query_start: Array, query_len: Array, context_len: Array
) -> KVPages:
    """Read all pages with new tokens, merge these in, and write the pages together. Invalid pieces are dropped."""
    if not isinstance(pages, PackedPages) or pages.scale is None:
        raise NotImplementedError("write_kv 'pages' writes packed pages that are quantised")
    num_tokens, _, head_dim = k.shape
    count, pieces = cut(pages.page_size, num_tokens, page_table, query_start, query_len, context_len)
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


BACKENDS = (Backend("tpu", "orca_jax.kernels.kv_write.tpu", "tpu"),)
"""Kernels of single platforms, by name. A module has `refusal(pages)` and `write(...)`."""

_PLAIN: dict[str, Callable[..., KVPages]] = {"scatter": scatter, "blocks": blocks, "pages": _pages}
"""The implementations for all platforms, in plain XLA."""
