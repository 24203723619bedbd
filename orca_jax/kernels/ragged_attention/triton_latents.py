"""Attention over latents for CUDA cards, by the Triton kernels of keys and values (`triton.py`).

A page without values `[D, S]` is one contiguous range of memory. A block of C tokens lies within a page, so it is read
in vectors. It is read once: its columns are the keys, and its rows the values.

    page_table[row] ->  page [D, S], slots n * C : + C      K = V = block [D, C]
    scores  [M, C] = q [M, D] . block                       M = the query heads, or those of several queries
    values  [M, D] = weights [M, C] . block^T               D = 576 is 4 * 128 + 64

All query heads share the latents. Up to 32 of them are the rows of one program. More heads have several programs, which
are neighbours and read the same pages from the second-level cache. A partial result has D numbers for each query head,
as much memory as 32 tokens for 16 heads: so pieces are fewer and longer than in `triton.py`.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from orca_jax.kernels.kv_pages import HeadMajorPages, KVPages, RowArrays
from orca_jax.kernels.ragged_attention.api import Scores
from orca_jax.kernels.ragged_attention.gpu_plan import multiprocessors_here, refuse_traced
from orca_jax.kernels.ragged_attention.triton import (
    LEAST_ROWS,
    PAGE_DTYPES,
    TritonShape,
    attend_shaped,
)

MOST_HEADS = 32
"""Query heads of a program: with more, or with more rows of chunks, its sums do not fit into registers of an A100."""

_BLOCK = 32  # tokens; three blocks of DeepSeek's latents take 108 KiB
_FEW_TOKENS = (
    512  # chunks are short, such as tokens to verify, and large tiles would have empty rows
)
_WIDEST = 128  # part of D: a product of all of it would hold its queries in registers


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> str | None:
    """The reason why these kernels cannot do these shapes, or None if they can."""
    if not isinstance(pages, HeadMajorPages) or pages.v is not None or pages.k.shape[1] != 1:
        return "attention 'triton_latents' needs pages without values, of one head"
    if pages.dtype.name not in PAGE_DTYPES:
        return f"attention 'triton_latents' supports pages of {', '.join(PAGE_DTYPES)}, not of {pages.dtype}"
    if q.shape[2] % LEAST_ROWS or pages.page_size % LEAST_ROWS:
        return (
            f"attention 'triton_latents' needs latents and a page_size that are multiples of {LEAST_ROWS},"
            f" not {q.shape[2]} and {pages.page_size}"
        )
    if pages.is_quantised and 2**31 <= pages.k.size <= 2**32:
        return (
            "attention 'triton_latents' cannot address 2 to 4 GiB of 8-bit pages by 32-bit offsets;"
            " use fewer or more pages"
        )
    return None


def attend(
    q: Float[Array, "T H D"],
    pages: KVPages,
    requests: RowArrays,
    scores: Scores,
    *,
    multiprocessors: int | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """`ragged_attention` over pages without values; `triton.attend` has the other arguments.

    Raises:
        NotImplementedError: `refusal` returns a reason, or the window is traced.
    """
    if (reason := refusal(q, pages)) or not isinstance(pages, HeadMajorPages):
        raise NotImplementedError(reason)
    refuse_traced(scores, "triton_latents")
    shape = shape_of(q, pages, scores, interpret=interpret)
    kv = pages.k.reshape(-1, pages.page_size)
    items = shape.num_kv_heads * (multiprocessors or multiprocessors_here())
    return attend_shaped(
        q, kv, pages.k_scale, requests, scores, shape, for_chunks(shape, q.shape[0]), items
    )


def shape_of(
    q: Float[Array, "T H D"] | jax.ShapeDtypeStruct,
    pages: HeadMajorPages,
    scores: Scores,
    *,
    interpret: bool = False,
) -> TritonShape:
    """Parameters for increments. Parts of the query heads take the place of KV heads."""
    heads = q.shape[1]
    groups = max(size for size in range(1, MOST_HEADS + 1) if heads % size == 0)
    is_float = pages.dtype == jnp.float32
    dtype = jnp.float32 if is_float else jnp.float16 if pages.dtype == jnp.float16 else jnp.bfloat16
    rows = max(LEAST_ROWS, pl.next_power_of_2(groups))
    return TritonShape(
        head_dim=q.shape[2],
        num_kv_heads=heads // groups,
        groups=groups,
        page_size=pages.page_size,
        rows=rows,
        # the largest power of two that divides a page
        block=min(LEAST_ROWS if is_float else _BLOCK, pages.page_size & -pages.page_size),
        warps=8 if is_float or rows > LEAST_ROWS else 4,
        stages=3,
        dtype=dtype,
        is_fp8=pages.dtype == jnp.float8_e4m3fn,
        scores=replace(scores, sinks=None),
        interpret=interpret,
        has_values=False,
        widest=_WIDEST,
    )


def for_chunks(shape: TritonShape, num_tokens: int) -> TritonShape:
    """Parameters for the chunks of a batch: in a large one several queries of a prompt share what they read."""
    if num_tokens <= _FEW_TOKENS:
        return shape
    return replace(shape, rows=max(MOST_HEADS, shape.rows), warps=8)
