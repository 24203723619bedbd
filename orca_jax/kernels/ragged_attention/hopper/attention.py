"""Ragged paged attention for Hopper, in Mosaic GPU: pages by TMA, products by wgmma.

A page is packed (`kernels/kv_pages.py`), so K and V of one head are two column ranges of its rows, and TMA
fetches each as a box of its own:

             head 0      head 1              head K-1
    slot 0  [K D][V D]  [K D][V D]   ...   [K D][V D]
    slot 1  [K D][V D]  [K D][V D]   ...   [K D][V D]          q box   [rows, D]
      ...                                                      K box   [block, D]   1 page, part of one, or several
    slot S-1                                                   V box   [block, D]

One call is two kernels, because increments are bound by memory and chunks by arithmetic. Each works through a list
that `gpu_plan.py` cuts from the requests' lengths:

    q [T, H, D]   increments' rows --> attend_pieces --> pieces --+                         gpu_increments.py
                                                                  v
                  chunks' rows     --------------------> attend_chunks --> out [T, H, D]    gpu_chunks.py

The second also puts the increments together from their pieces and clears padding, so that one kernel writes all of
`out` and nothing is left to XLA: to start a kernel takes some 2 us, in which an H200 reads 10 MB.

`gpu_common.py` has what they share: the way of K and V through shared memory, and the softmax.

wgmma is Hopper's own. What `refusal` names, and other GPUs, are for other implementations.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages, PackedPages, num_kv_heads
from orca_jax.kernels.ragged_attention import gpu_plan
from orca_jax.kernels.ragged_attention.gpu_plan import ROWS, cut_contexts, cut_queries
from orca_jax.kernels.ragged_attention.hopper.chunks import attend_chunks
from orca_jax.kernels.ragged_attention.hopper.increments import attend_pieces
from orca_jax.kernels.ragged_attention.hopper.pipeline import Shape

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
    # An argument that is a slice of another array XLA passes as such, and then holds the call out of its CUDA graph.
    page_table = lax.optimization_barrier(page_table)
    rows = min(num_tokens, page_table.shape[0])  # increments are the first rows, and their queries the first tokens
    pieces = cut_contexts(
        query_len[:rows],
        context_len[:rows],
        num_pieces=gpu_plan.most_pieces(rows, kv_heads, multiprocessors),
        block=shape.block,
        sliding_window=sliding_window,
    )
    increments = attend_pieces(shape, q, pages.kv, page_table, pieces, grid=multiprocessors), pieces
    shape = replace(shape, **gpu_plan.CHUNK_BLOCKS._asdict())
    cut = partial(cut_queries, size=gpu_plan.TILE, block=shape.block, sliding_window=sliding_window)
    tiles = cut(query_start, query_len, context_len, num_tokens=num_tokens)
    num_used = query_len.sum(dtype=jnp.int32)
    out = attend_chunks(shape, q, pages.kv, page_table, tiles, increments, num_used, grid=multiprocessors)
    return out.astype(dtype)


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> str | None:
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


attend = ragged_attention_gpu
"""The name that the table of backends expects."""
