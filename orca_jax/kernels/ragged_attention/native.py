"""Ragged attention on CPUs by the library of `kernels/native`: its increments, and chunks in plain XLA (`xla.py`)."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import HeadMajorPages, KVPages
from orca_jax.kernels.native import attend_increments, loaded_library
from orca_jax.kernels.ragged_attention.xla import ragged_attention_xla

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
    window = jnp.asarray(_NO_WINDOW if sliding_window is None else sliding_window)
    increments = partial(
        attend_increments,
        keys=pages.k,
        values=pages.v,
        page_table=page_table,
        query_start=query_start,
        context_len=context_len,
        count=jnp.sum(query_len == 1),
        window=window,
        soft_cap=soft_cap,
    )
    rows = page_table, query_start, query_len, context_len
    scores: dict[str, Any] = {"scale": scale, "sliding_window": sliding_window, "soft_cap": soft_cap}
    return ragged_attention_xla(q, pages, *rows, **scores, increments=increments)
