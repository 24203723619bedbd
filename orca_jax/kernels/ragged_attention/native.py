"""Ragged attention on CPUs by the library of `kernels/native`: new tokens and increments. Chunks are XLA's."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import HeadMajorPages, KVPages
from orca_jax.kernels.native import attend_increments, loaded_library, write_and_attend_increments
from orca_jax.kernels.ragged_attention.xla import attention_of_blocks, grouped_queries, with_chunks

_NO_WINDOW = 2**30


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> str | None:
    """The reason why the library cannot read such pages, or None if it can."""
    library = loaded_library()
    if library is None:
        return "'native' needs its library, which this process has not loaded (cpu_products)"
    if not isinstance(pages, HeadMajorPages) or pages.dtype not in (jnp.float32, jnp.bfloat16):
        return "'native' reads head-major pages in float32 or bfloat16"
    if pages.page_size % library.lanes or pages.page_size > library.most_tokens:
        return f"'native' reads pages of a multiple of {library.lanes} tokens, up to {library.most_tokens}"
    if q.shape[2] > library.most_channels:
        return f"'native' reads heads of up to {library.most_channels} channels"
    return None


def attend(
    q: Float[Array, "T H D"],
    pages: HeadMajorPages,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    scale: float,
    sliding_window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "T H D"]:
    """`ragged_attention` for pages that `refusal` accepts."""
    queries, rows = grouped_queries(q, pages, scale), (page_table, query_start, query_len, context_len)
    increments = attend_increments(
        queries,
        pages.k,
        pages.v,
        page_table,
        query_start,
        context_len,
        jnp.sum(query_len == 1),
        window=_window(sliding_window),
        soft_cap=soft_cap,
    )
    attend = attention_of_blocks(queries, pages, *rows, sliding_window, soft_cap)
    return with_chunks(q, query_len, attend, increments)


def write_and_attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: HeadMajorPages,
    prepared: tuple[Array, ...],
    first_page: Int[Array, ""],
    *,
    scale: float,
    sliding_window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "T H D"], HeadMajorPages]:
    """The work of one layer; see `api.write_and_attend`. The library writes the tokens of increments as it reads."""
    page_table, query_start, query_len, context_len = prepared
    rows = page_table + first_page, query_start, query_len, context_len
    queries = grouped_queries(q, pages, scale)
    increments, keys, values = write_and_attend_increments(
        queries,
        pages.k,
        pages.v,
        k,
        v,
        *rows,
        jnp.sum(query_len == 1),
        window=_window(sliding_window),
        soft_cap=soft_cap,
    )
    pages = HeadMajorPages(keys, values)
    attend = attention_of_blocks(queries, pages, *rows, sliding_window, soft_cap)
    return with_chunks(q, query_len, attend, increments), pages


def _window(sliding_window: int | Int[Array, ""] | None) -> Int[Array, ""]:
    return jnp.asarray(_NO_WINDOW if sliding_window is None else sliding_window)
