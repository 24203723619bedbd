"""The oracle: literally split, attend, merge, as the paper's Figure 5 draws it."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages


def ragged_attention_reference(
    q: Float[Array, "T H D"],
    pages: KVPages,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    scale: float,
) -> Float[Array, "T H D"]:
    """See `ragged_attention`. Pads every request to T queries and P pages, so it is for small shapes."""
    merged = jnp.zeros_like(q)
    for row in range(page_table.shape[0]):
        # Split: this request's queries, then its keys and values, page after page.
        index = query_start[row] + jnp.arange(q.shape[0])
        queries = jnp.take(q, index, axis=0, mode="clip")
        keys, values = (_tokens(pool[page_table[row]]) for pool in pages)
        # Attend.
        position = context_len[row] - query_len[row] + jnp.arange(q.shape[0])
        attended = _attend(queries, keys, values, position, context_len[row], scale)
        # Merge: places past this request's queries are out of range, and are dropped.
        index = jnp.where(jnp.arange(q.shape[0]) < query_len[row], index, q.shape[0])
        merged = merged.at[index].set(attended.astype(q.dtype), mode="drop")
    return merged


def _tokens(pages: Float[Array, "P K D S"]) -> Float[Array, "C K D"]:
    """The tokens of some pages in order, C = P * S."""
    return jnp.moveaxis(pages, 3, 1).reshape(-1, *pages.shape[1:3])


def _attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "C K D"],
    v: Float[Array, "C K D"],
    position: Int[Array, " T"],
    context_len: Int[Array, ""],
    scale: float,
) -> Float[Array, "T H D"]:
    """Dense causal attention of one request in f32; query head h reads KV head h // G."""
    groups = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x.astype(jnp.float32), groups, axis=1) for x in (k, v))
    scores = jnp.einsum("thd,chd->htc", q.astype(jnp.float32), k, precision=jax.lax.Precision.HIGHEST) * scale
    token = jnp.arange(k.shape[0])
    visible = (token <= position[:, None]) & (token < context_len)
    # Slots that were never written may hold anything, NaN too: zero weight does not silence them.
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(jnp.float32).min), axis=-1)
    v = jnp.where((token < context_len)[:, None, None], v, 0.0)
    return jnp.einsum("htc,chd->thd", weights, v, precision=jax.lax.Precision.HIGHEST)
