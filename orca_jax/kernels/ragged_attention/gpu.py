"""Ragged paged attention for Hopper, in Mosaic GPU: pages by TMA, products by wgmma.

A page is packed (`kernels/kv_pages.py`), so K and V of one head are two column ranges of its rows, and TMA
fetches each as a box of its own:

             head 0      head 1              head K-1
    slot 0  [K D][V D]  [K D][V D]   ...   [K D][V D]
    slot 1  [K D][V D]  [K D][V D]   ...   [K D][V D]          q box   [rows, D]
      ...                                                      K box   [block, D]   1 page, part of one, or several
    slot S-1                                                   V box   [block, D]

One call is three kernels, because increments are bound by memory and chunks by arithmetic. Each works through a list
that `gpu_plan.py` cuts from the requests' lengths:

    q [T, H, D]   increments' rows  --> attend_pieces --> combine_pieces --+     gpu_increments.py
                  chunks' rows      --> attend_chunks ---------------------+-->  gpu_chunks.py      out [T, H, D]
                  padding           --> zeros -----------------------------+

`gpu_common.py` has what they share: the way of K and V through shared memory, and the softmax.

wgmma is Hopper's own. What `refusal` names, and other GPUs, are for other implementations.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages, PackedPages, num_kv_heads
from orca_jax.kernels.ragged_attention import gpu_plan
from orca_jax.kernels.ragged_attention.gpu_chunks import attend_chunks
from orca_jax.kernels.ragged_attention.gpu_common import Shape
from orca_jax.kernels.ragged_attention.gpu_increments import attend_pieces, combine_pieces
from orca_jax.kernels.ragged_attention.gpu_plan import ROWS, cut_contexts, cut_queries

HEAD_DIMS = tuple(gpu_plan.INCREMENT_BLOCKS)
PAGE_SIZES = (16, 32, 64, 128, 256)


@partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "multiprocessors", "interpret"))
def ragged_attention_gpu(
    q: Float[Array, "T H D"],
    pages: KVPages,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    multiprocessors: int = 132,
    interpret: Any = None,
) -> Float[Array, "T H D"]:
    """See `ragged_attention`.

    Args:
        multiprocessors: how many the device has; another number costs speed and nothing else. H100 and H200 have 132.
        interpret: as `plgpu.kernel` takes it, to run without a GPU.

    Raises:
        NotImplementedError: what `refusal` says.
    """
    if (reason := refusal(q, pages)) or not isinstance(pages, PackedPages):
        raise NotImplementedError(reason)
    dtype, q = q.dtype, q.astype(jnp.bfloat16)
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = num_kv_heads(pages, head_dim)
    shape = Shape(
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        groups=num_heads // kv_heads,
        page_size=pages.page_size,
        **gpu_plan.INCREMENT_BLOCKS[head_dim]._asdict(),
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    rows = min(num_tokens, page_table.shape[0])  # increments are the first rows, and their queries the first tokens
    out = _attend_increments(
        shape, q[:rows], pages.kv, page_table, query_len[:rows], context_len[:rows], multiprocessors
    )
    token = jnp.arange(num_tokens)[:, None, None]
    out = jnp.pad(out, ((0, num_tokens - rows), (0, 0), (0, 0)))
    if num_tokens > 1:
        chunk_shape = replace(shape, **gpu_plan.CHUNK_BLOCKS._asdict())
        cut = partial(cut_queries, size=gpu_plan.TILE, block=chunk_shape.block, sliding_window=sliding_window)
        tiles = cut(query_start, query_len, context_len, num_tokens=num_tokens)
        padded = jnp.pad(q, ((0, max(0, ROWS - num_tokens)), (0, 0), (0, 0)))  # TMA fetches 64 rows at once
        chunks = attend_chunks(chunk_shape, padded, pages.kv, page_table, tiles, grid=multiprocessors)
        out = jnp.where(token < jnp.sum(query_len == 1), out, chunks[:num_tokens])
    return jnp.where(token < query_len.sum(), out, jnp.zeros_like(out)).astype(dtype)


def _attend_increments(
    shape: Shape,
    q: Float[Array, "R H D"],
    kv: Float[Array, "N S W"],
    page_table: Int[Array, "R P"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    multiprocessors: int,
) -> Float[Array, "R H D"]:
    """Rows that are increments; others' output stays as it is in memory."""
    rows, num_heads, head_dim = q.shape
    padded = pl.cdiv(shape.groups, 8) * 8
    grouped = q.reshape(rows, shape.num_kv_heads, shape.groups, head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padded - shape.groups), (0, 0)))
    pieces = cut_contexts(
        query_len,
        context_len,
        num_pieces=gpu_plan.most_pieces(rows, shape.num_kv_heads, multiprocessors),
        block=shape.block,
        sliding_window=shape.sliding_window,
    )
    out = combine_pieces(shape, *attend_pieces(shape, grouped, kv, page_table, pieces, grid=multiprocessors), pieces)
    out = out[:, : shape.num_kv_heads * padded].reshape(rows, shape.num_kv_heads, padded, head_dim)
    return out[:, :, : shape.groups].reshape(rows, num_heads, head_dim)


def refusal(q: Float[Array, "T H D"], pages: KVPages) -> str | None:
    """Why these kernels cannot do this; None if they can."""
    head_dim = q.shape[2]
    if not isinstance(pages, PackedPages):
        return "attention 'gpu' reads packed pages only"
    if pages.dtype != jnp.bfloat16:
        return f"attention 'gpu' reads pages of bfloat16, not of {pages.dtype}"
    if head_dim not in HEAD_DIMS:
        return f"attention 'gpu' has head dims {HEAD_DIMS}, not {head_dim}"
    if pages.page_size not in PAGE_SIZES:
        return f"attention 'gpu' has page sizes {PAGE_SIZES}, not {pages.page_size}"
    if q.shape[1] // num_kv_heads(pages, head_dim) > ROWS:
        return f"attention 'gpu' takes at most {ROWS} query heads for each KV head"
    return None
