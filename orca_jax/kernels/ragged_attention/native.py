"""Ragged attention on CPUs by the library of `kernels/native`: new tokens and increments. Chunks are XLA's."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import HeadMajorPages, KVPages, RowArrays
from orca_jax.kernels.native import attend_increments, loaded_library, write_and_attend_increments
from orca_jax.kernels.ragged_attention.api import NO_WINDOW, Scores
from orca_jax.kernels.ragged_attention.xla import attention_of_blocks, grouped_queries, with_chunks


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> str | None:
    """The reason why the library cannot read these pages, or None if it can."""
    library = loaded_library()
    if library is None:
        return "'native' needs its library, which this process has not loaded (cpu_products)"
    if not isinstance(pages, HeadMajorPages) or pages.dtype not in (jnp.float32, jnp.bfloat16) or pages.v is None:
        return "'native' reads head-major pages of keys and values in float32 or bfloat16"
    if pages.page_size % library.lanes or pages.page_size > library.most_tokens:
        return f"'native' reads pages of a multiple of {library.lanes} tokens, up to {library.most_tokens}"
    if q.shape[2] > library.most_channels:
        return f"'native' reads heads of up to {library.most_channels} channels"
    return None


def attend(
    q: Float[Array, "T H D"], pages: HeadMajorPages, requests: RowArrays, scores: Scores
) -> Float[Array, "T H D"]:
    """`ragged_attention` for pages that `refusal` accepts."""
    queries = grouped_queries(q, pages, scores.scale)
    increments = attend_increments(queries, pages, requests, _window(scores), scores.sinks, soft_cap=scores.soft_cap)
    return with_chunks(q, requests, attention_of_blocks(queries, pages, requests, scores), increments)


def write_and_attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: HeadMajorPages,
    prepared: RowArrays,
    first_page: Int[Array, ""],
    scores: Scores,
) -> tuple[Float[Array, "T H D"], HeadMajorPages]:
    """The work of one layer; see `api.write_and_attend`. The library writes the tokens of increments as it reads."""
    requests = prepared.of_layer(first_page)
    queries = grouped_queries(q, pages, scores.scale)
    increments, pages = write_and_attend_increments(
        queries, k, v, pages, requests, _window(scores), scores.sinks, soft_cap=scores.soft_cap
    )
    return with_chunks(q, requests, attention_of_blocks(queries, pages, requests, scores), increments), pages


def _window(scores: Scores) -> Int[Array, ""]:
    return jnp.asarray(NO_WINDOW if scores.window is None else scores.window)
