"""Ragged attention for TPUs, in Pallas (Mosaic), over packed pages.

An iteration has increments, which are its first rows and whose queries are its first tokens, and chunks. Each kind
has a kernel of its own and a run of query blocks of its own; one that has none runs no step:

    increments  `tpu_increments.py`   bound by memory: eight rows at a time, several KV heads in one product
    chunks      `tpu_chunks.py`       bound by products: many queries of one head at a time

Both are turns of one loop (`tpu_walk.py`), which fetches pages while it computes, and share an online softmax
(`tpu_softmax.py`). `tpu_blocks.py` says how much is fetched and multiplied at a time.

Scores and sums are float32. Pages in bfloat16 are multiplied as they are, with the weights rounded to bfloat16; pages
of 8 bits become bfloat16 first.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages, PackedPages, num_kv_heads, slots
from orca_jax.kernels.kv_write_tpu import write_chunks
from orca_jax.kernels.ragged_attention.tpu_blocks import Blocks, Heads, choose_blocks
from orca_jax.kernels.ragged_attention.tpu_chunks import attend_chunks
from orca_jax.kernels.ragged_attention.tpu_increments import attend_increments
from orca_jax.kernels.ragged_attention.tpu_shape import LANES, SUBLANES, Shape
from orca_jax.kernels.ragged_attention.tpu_walk import RowArrays

_LOG2E = math.log2(math.e)


def ragged_attention_tpu(
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
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> Float[Array, "T H D"]:
    """See `ragged_attention`.

    Args:
        blocks: sizes, to try others than the table's.
        interpret: as `pallas_call` takes it, to run without a TPU.

    Raises:
        NotImplementedError: the pages are not packed, or do not have whole tiles.
    """
    rows = RowArrays(_page_lists(page_table), query_start, query_len, context_len)
    call = _Call(q, pages, rows, scale, sliding_window, soft_cap, blocks, interpret)
    out, pages = call.increments(call.pages, None)
    return call.merged(out, call.chunks(pages))


def write_and_attend_tpu(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: KVPages,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "T H D"], KVPages]:
    """`write_kv` and `ragged_attention` at once: the kernel of increments writes what it has just read.

    Args are theirs.

    Raises:
        NotImplementedError: the pages are not packed, do not have whole tiles, or are quantised.
    """
    if pages.is_quantised:
        raise NotImplementedError("a token may change the scale of its page: quantised pages are written by write_kv")
    rows = RowArrays(_page_lists(page_table), query_start, query_len, context_len)
    call = _Call(q, pages, rows, scale, sliding_window, soft_cap, blocks, interpret)
    new = slots(k, v, pages.dtype)
    out, written = call.increments(call.pages, new)
    if q.shape[0] > 1:
        written = write_chunks(written, new, page_table, query_start, query_len, context_len, interpret=interpret)
    return call.merged(out, call.chunks(written)), written


def refusal(pages: KVPages) -> str | None:
    """Why the kernels cannot read such pages; None where they can."""
    if not isinstance(pages, PackedPages):
        return "attention 'tpu' reads packed pages only"
    least = SUBLANES * 4 // pages.dtype.itemsize
    if pages.page_size % least:
        return f"attention 'tpu' needs a page_size that is a multiple of {least}, not {pages.page_size}"
    return None


class _Call:
    """One call of both kernels."""

    def __init__(
        self,
        q: Float[Array, "T H D"],
        pages: KVPages,
        rows: RowArrays,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        blocks: Blocks | None,
        interpret: Any,
    ) -> None:
        if (reason := refusal(pages)) is not None:
            raise NotImplementedError(reason)
        assert isinstance(pages, PackedPages), "the only layout that is not refused"
        self.pages, self.rows, self.num_tokens = pages, rows, q.shape[0]
        self.blocks = blocks or choose_blocks(_heads(q, pages))
        is_exact = q.dtype == jnp.float32 and pages.dtype == jnp.float32
        kv_heads = num_kv_heads(pages, q.shape[2])
        self.shape = Shape(
            num_kv_heads=kv_heads,
            groups=q.shape[1] // kv_heads,
            head_dim=q.shape[2],
            page_size=pages.page_size,
            page_dtype=pages.dtype,
            query_block=self.blocks.increment_rows,
            fetch_pages=self.blocks.fetch_pages,
            compute_pages=self.blocks.compute_pages,
            whole_pages=self.blocks.whole_pages,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            compute_dtype=jnp.float32 if is_exact else jnp.bfloat16,
            is_quantised=pages.is_quantised,
        )
        # Weights are powers of two, which spares a product for each score.
        factor = scale if soft_cap is not None else scale * _LOG2E
        self.q = (q.astype(jnp.float32) * factor).astype(self.shape.compute_dtype)
        self.options: dict[str, Any] = {"out_dtype": q.dtype, "interpret": interpret}

    def increments(
        self, pages: PackedPages, new: Float[Array, "T W"] | None
    ) -> tuple[Float[Array, "T H D"], PackedPages]:
        """Outputs of the rows with one query; and the pages, with `new` of those rows if it is given."""
        shape = replace(self.shape, is_writing=new is not None)
        return attend_increments(shape, self.q, pages, self.rows, new=new, **self.options)

    def chunks(self, pages: PackedPages) -> Float[Array, "T H D"] | None:
        """Outputs of the other rows; None where there is no room for any."""
        if self.num_tokens == 1:
            return None
        query_block = min(self.blocks.query_block, pl.cdiv(self.num_tokens, 16) * 16)
        shape = replace(self.shape, query_block=query_block)
        return attend_chunks(shape, self.q, pages, self.rows, **self.options)

    def merged(self, increments: Float[Array, "T H D"], chunks: Float[Array, "T H D"] | None) -> Float[Array, "T H D"]:
        """Outputs of all tokens, and zeros for padding."""
        token = jnp.arange(self.num_tokens)[:, None, None]
        out = increments if chunks is None else jnp.where(token < self.rows.num_increments, increments, chunks)
        # Blocks without a request are not visited, and what stands there may be anything.
        return jnp.where(token < self.rows.length.sum(), out, jnp.zeros_like(out))


def _heads(q: Array, pages: PackedPages) -> Heads:
    """What block sizes depend on; a program that is compiled for another machine's TPU gets the rule's."""
    device = jax.devices()[0].device_kind if jax.default_backend() == "tpu" else ""
    kv_heads = num_kv_heads(pages, q.shape[2])
    return Heads(device, kv_heads, q.shape[1] // kv_heads, q.shape[2], pages.page_size, pages.dtype.itemsize)


def _page_lists(page_table: Int[Array, "R P"]) -> Int[Array, "L 1 128"]:
    """The page table, a row in lines of 128 pages."""
    rows, width = page_table.shape
    padded = jnp.pad(page_table, ((0, 0), (0, -width % LANES)))
    return padded.reshape(rows * (padded.shape[1] // LANES), 1, LANES)
