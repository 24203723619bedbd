"""Ragged paged attention for Hopper, in Mosaic GPU: pages by TMA, products by wgmma.

A page is token major (`kernels/kv_pages.py`): K and V of one head are two column ranges of its rows, and TMA fetches
each range as one box:

             head 0      head 1              head K-1
    slot 0  [K D][V D]  [K D][V D]   ...   [K D][V D]
    slot 1  [K D][V D]  [K D][V D]   ...   [K D][V D]          q box   [rows, D]
      ...                                                      K box   [block, D]   1 page, part of one, or several
    slot S-1                                                   V box   [block, D]

One call is two kernels, because increments are bound by memory and chunks by arithmetic. Each kernel works through a
list, made from the requests' lengths by `gpu_plan.py`:

    q [T, H, D]   increments' rows --> attend_pieces --> pieces --+                         increments.py
                                                                  v
                  chunks' rows     --------------------> attend_chunks --> out [T, H, D]    chunks.py

The second kernel also combines the pieces of increments and clears padding. So one kernel writes all of `out` and
nothing is left to XLA: the start of a kernel takes some 2 us, and an H200 reads 10 MB in this time.

`pipeline.py` is shared by both: the path of K and V through shared memory, and the softmax.

The wgmma instruction exists only on Hopper. Other GPUs, and the shapes refused by `refusal`, need another backend.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from orca_jax.kernels.kv_pages import KVPages, RowArrays, TokenMajorPages, num_kv_heads
from orca_jax.kernels.ragged_attention import gpu_plan
from orca_jax.kernels.ragged_attention.api import Scores
from orca_jax.kernels.ragged_attention.gpu_plan import ROWS, cut_contexts, cut_queries
from orca_jax.kernels.ragged_attention.hopper.assembler import refusal_of_assembler
from orca_jax.kernels.ragged_attention.hopper.chunks import attend_chunks
from orca_jax.kernels.ragged_attention.hopper.increments import attend_pieces, sinks_of_tiles
from orca_jax.kernels.ragged_attention.hopper.pipeline import HopperShape

HEAD_DIMS = tuple(gpu_plan.INCREMENT_BLOCKS)
PAGE_SIZES = (16, 32, 64, 128, 256)


def attend(
    q: Float[Array, "T H D"],
    pages: KVPages,
    requests: RowArrays,
    scores: Scores,
    *,
    multiprocessors: int | None = None,
    interpret: Any = None,
) -> Float[Array, "T H D"]:
    """`ragged_attention` on a Hopper GPU.

    Args:
        multiprocessors: number of the device's multiprocessors; None asks the device. A wrong number costs only speed.
        interpret: argument of `plgpu.kernel`, to run without a GPU.

    Raises:
        NotImplementedError: `refusal` returns a reason, or the window is traced.
    """
    if (reason := refusal(q, pages)) or not isinstance(pages, TokenMajorPages):
        raise NotImplementedError(reason)
    gpu_plan.refuse_traced(scores, "gpu")
    return _ragged(
        q, pages, requests, scores, multiprocessors or gpu_plan.multiprocessors_here(), interpret
    )


@partial(jax.jit, static_argnums=(4, 5))
def _ragged(
    q: Float[Array, "T H D"],
    pages: TokenMajorPages,
    requests: RowArrays,
    scores: Scores,
    multiprocessors: int,
    interpret: Any,
) -> Float[Array, "T H D"]:
    page_table, _, query_len, context_len = requests
    dtype = q.dtype
    q = q.astype(jnp.bfloat16)
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = num_kv_heads(pages, head_dim)
    shape = HopperShape(
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        groups=num_heads // kv_heads,
        page_size=pages.page_size,
        **gpu_plan.INCREMENT_BLOCKS[head_dim]._asdict(),
        scores=replace(scores, sinks=None),
        interpret=interpret,
    )
    # Without the barrier XLA may pass a slice of another array as an argument, and keep the call out of the CUDA graph.
    page_table = lax.optimization_barrier(page_table)
    # increments are the first rows, and their queries the first tokens
    rows = min(num_tokens, page_table.shape[0])
    pieces = cut_contexts(
        query_len[:rows],
        context_len[:rows],
        num_pieces=gpu_plan.most_pieces(rows, kv_heads, multiprocessors),
        block=shape.block,
        sliding_window=scores.sliding_window,
    )
    increments = attend_pieces(shape, q, pages.kv, page_table, pieces, grid=multiprocessors), pieces
    shape = replace(shape, **gpu_plan.CHUNK_BLOCKS._asdict())
    tiles = cut_queries(
        requests,
        size=gpu_plan.TILE,
        num_tokens=num_tokens,
        block=shape.block,
        sliding_window=scores.sliding_window,
    )
    num_used = query_len.sum(dtype=jnp.int32)
    sinks = sinks_of_tiles(shape, scores.sinks)
    out = attend_chunks(
        shape, q, pages.kv, page_table, tiles, increments, num_used, sinks, grid=multiprocessors
    )
    return out.astype(dtype)


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> str | None:
    """The reason why these kernels cannot do these shapes, or None if they can."""
    head_dim = q.shape[2]
    if not isinstance(pages, TokenMajorPages):
        return "attention 'gpu' supports token-major pages only"
    if pages.dtype != jnp.bfloat16:
        return f"attention 'gpu' supports pages of bfloat16, not of {pages.dtype}"
    if head_dim not in HEAD_DIMS:
        return f"attention 'gpu' supports head dims {HEAD_DIMS}, not {head_dim}"
    if pages.page_size not in PAGE_SIZES:
        return f"attention 'gpu' supports page sizes {PAGE_SIZES}, not {pages.page_size}"
    if q.shape[1] // num_kv_heads(pages, head_dim) > ROWS:
        return f"attention 'gpu' supports at most {ROWS} query heads for each KV head"
    return None


def refusal_of_device(device: jax.Device) -> str | None:
    """The reason why the kernels must not run on this device, or None if they can."""
    return refusal_of_assembler()
