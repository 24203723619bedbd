"""Ragged attention on CPUs by the library of `kernels/native`, which also writes the new tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import HeadMajorPages, KVPages, RowArrays
from orca_jax.kernels.native import attend_in_c
from orca_jax.kernels.ragged_attention.api import NO_WINDOW, Scores
from orca_jax.kernels.ragged_attention.xla import grouped_queries

_LANES, _MOST_CHANNELS = 16, 512  # of a vector and a head, on every processor


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> str | None:
    """The reason why the library cannot read these pages, or None if it can."""
    types = jnp.float32, jnp.bfloat16, jnp.int8
    if not isinstance(pages, HeadMajorPages) or pages.dtype not in types or pages.v is None:
        return "'native' reads head-major pages of keys and values in float32, bfloat16 or int8"
    if pages.page_size % _LANES:
        return f"'native' reads pages of a multiple of {_LANES} tokens"
    if q.shape[2] > _MOST_CHANNELS:
        return f"'native' reads heads of up to {_MOST_CHANNELS} channels"
    return None


def attend(
    q: Float[Array, "T H D"], pages: HeadMajorPages, requests: RowArrays, scores: Scores
) -> Float[Array, "T H D"]:
    """`ragged_attention` for pages that `refusal` accepts."""
    return _attend(q, None, pages, requests, scores)[0]


def write_and_attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: HeadMajorPages,
    prepared: RowArrays,
    first_page: Int[Array, ""],
    scores: Scores,
) -> tuple[Float[Array, "T H D"], HeadMajorPages]:
    """The work of one layer; see `api.write_and_attend`."""
    return _attend(q, (k, v), pages, prepared.of_layer(first_page), scores)


def _attend(
    q: Float[Array, "T H D"],
    new: tuple[Float[Array, "T K D"], Float[Array, "T K D"]] | None,
    pages: HeadMajorPages,
    requests: RowArrays,
    scores: Scores,
) -> tuple[Float[Array, "T H D"], HeadMajorPages]:
    queries = grouped_queries(q, pages, scores.scale)
    window = jnp.asarray(NO_WINDOW if scores.window is None else scores.window)
    out, pages = attend_in_c(
        queries, new, pages, requests, window, scores.sinks, soft_cap=scores.soft_cap
    )
    return out[: len(q)].reshape(q.shape).astype(q.dtype), pages
