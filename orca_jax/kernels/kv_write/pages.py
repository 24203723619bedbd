"""New tokens of whole pages: read the pages, merge the tokens in, and write the pages together."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from orca_jax.kernels.kv_pages import (
    HeadMajorPages,
    KVPages,
    RowArrays,
    read_page,
    stored_tokens,
    write_pages,
)
from orca_jax.kernels.kv_write.pieces import PagePieces, cut

_LANES = 128  # of a TPU's register


def refusal(pages: KVPages) -> str | None:
    """The reason why these pages cannot be written, or None if they can."""
    if isinstance(pages, HeadMajorPages) or pages.is_quantised:
        return None
    return "writes token-major pages that are quantised"


def write(pages: KVPages, k: Array, v: Array | None, requests: RowArrays) -> KVPages:
    """Write tokens to the pages that have them. Invalid pieces are dropped."""
    if isinstance(pages, HeadMajorPages):
        return _head_major(pages, k, v, requests)
    assert pages.scale is not None, "refused"
    assert v is not None, "these pages have values"
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
    # unique, like all other pages
    page = jnp.where(piece < count, pieces.page, pages.kv.shape[0] + piece)
    return write_pages(pages, page, (merged[0], merged[1]), (least[0], least[1]))


def _head_major(
    pages: HeadMajorPages, k: Array, v: Array | None, requests: RowArrays
) -> HeadMajorPages:
    return write_pieces(pages, k, v, *cut(pages.page_size, k.shape[0], requests))


def _gathered(tokens: Array, token: Int[Array, "M S"]) -> Array:
    """Values or scales `[M, S, K, (D)]` of some tokens.

    A row of scales is widened to whole registers: libtpu's compiler ends its process at a gather of single numbers.
    """
    if tokens.ndim == 3:
        return tokens[token]
    wide = jnp.broadcast_to(tokens[..., None], (*tokens.shape, _LANES))
    return lax.optimization_barrier(wide)[token][..., 0]


def write_pieces(
    pages: HeadMajorPages,
    k: Array,
    v: Array | None,
    count: Int[Array, ""],
    pieces: PagePieces,
) -> HeadMajorPages:
    """Write the first `count` pieces of the new tokens."""
    slot, piece = (
        jnp.arange(size, dtype=jnp.int32) for size in (pages.page_size, pieces.page.shape[0])
    )
    token = jnp.clip(pieces.token[:, None] + slot, 0, k.shape[0] - 1)  # [M, S]
    is_new = (slot >= pieces.begin[:, None]) & (slot < pieces.end[:, None])
    # unique, like all other pages
    own = pieces.page + pieces.first_page
    page = jnp.where(piece < count, own, pages.k.shape[0] + piece)

    def put(pool: Array, tokens: Array) -> Array:
        new = jnp.moveaxis(_gathered(tokens, token), 1, -1)  # [M, K, (D,) S]
        merged = jnp.where(is_new.reshape(len(piece), *[1] * (new.ndim - 2), -1), new, pool[own])
        return pool.at[page].set(merged, mode="drop", unique_indices=True)

    pools, structure = jax.tree.flatten(pages)
    written = [
        put(pool, tokens) for pool, tokens in zip(pools, stored_tokens(pages, k, v), strict=True)
    ]
    return jax.tree.unflatten(structure, written)
