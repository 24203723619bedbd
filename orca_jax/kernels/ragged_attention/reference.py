"""The oracle: split, attend and merge, exactly as in Figure 5 of the paper."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from orca_jax.kernels.kv_pages import KVPages, RowArrays, page_tokens
from orca_jax.kernels.ragged_attention.api import Scores


def attend(
    q: Float[Array, "T H D"], pages: KVPages, requests: RowArrays, scores: Scores
) -> Float[Array, "T H D"]:
    """The oracle of `ragged_attention`, for small shapes: it pads every request to T queries and P pages."""
    page_table, query_start, query_len, context_len = requests
    merged = jnp.zeros_like(q)
    for row in range(page_table.shape[0]):
        # Split: the queries of this request, then its keys and values, page by page.
        index = query_start[row] + jnp.arange(q.shape[0])
        queries = jnp.take(q, index, axis=0, mode="clip")
        keys, values = page_tokens(pages, page_table[row], q.shape[2])
        # Attend.
        position = context_len[row] - query_len[row] + jnp.arange(q.shape[0])
        token = jnp.arange(keys.shape[0])
        visible = (token <= position[:, None]) & (token < context_len[row])
        if scores.window is not None:
            visible &= token > position[:, None] - scores.window
        # Other slots may hold any value, also NaN, and NaN times a weight of zero is NaN.
        is_query = jnp.arange(q.shape[0]) < query_len[row]
        is_seen = (visible & is_query[:, None]).any(axis=0)
        values = jnp.where(is_seen[:, None, None], values, 0.0)
        attended = _attend(queries, keys, values, visible, scores)
        # Merge: indices past this request's queries are out of range and dropped.
        index = jnp.where(jnp.arange(q.shape[0]) < query_len[row], index, q.shape[0])
        merged = merged.at[index].set(attended.astype(q.dtype), mode="drop")
    return merged


def _attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "C K D"],
    v: Float[Array, "C K D"],
    visible: Bool[Array, "T C"],
    scores: Scores,
) -> Float[Array, "T H D"]:
    """Dense attention of one request in f32; query head h reads KV head h // G."""
    groups = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
    products = jnp.einsum(
        "thd,chd->htc", q.astype(jnp.float32), k, precision=jax.lax.Precision.HIGHEST
    )
    capped = scores.capped(products * scores.scale)
    capped = jnp.where(visible, capped, jnp.finfo(jnp.float32).min)
    if scores.sinks is not None:  # one more column
        column = jnp.broadcast_to(
            scores.sinks.astype(jnp.float32)[:, None, None], (*capped.shape[:2], 1)
        )
        capped = jnp.concatenate([capped, column], axis=-1)
    weights = jax.nn.softmax(capped, axis=-1)[..., : visible.shape[1]]
    return jnp.einsum("htc,chd->thd", weights, v, precision=jax.lax.Precision.HIGHEST)


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> None:
    """Return None: this backend can do all shapes."""
