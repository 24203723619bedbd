"""Ragged attention for TPUs, in Pallas (Mosaic), over packed pages.

An iteration has increments, which are its first rows and whose queries are its first tokens, and chunks. Each kind
has a kernel of its own and a run of query blocks of its own; one that has none runs no step, and where there are no
chunks nothing is laid out for their kernel either:

    increments  `tpu_increments.py`   bound by memory: eight rows at a time, several KV heads in one product
    chunks      `tpu_chunks.py`       bound by products: many queries of one head at a time

Both are turns of one loop (`tpu_walk.py`), which fetches pages while it computes, and are called alike
(`tpu_launch.py`); they share an online softmax (`tpu_softmax.py`). `tpu_plan.py` has what they need to know of the
requests, once for all layers; `blocks.py` says how much is fetched and multiplied at a time.

Scores and sums are float32. Pages in bfloat16 are multiplied as they are, with the weights rounded to bfloat16; pages
of 8 bits become bfloat16 first.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages, PackedPages, num_kv_heads, slots, tile_tokens
from orca_jax.kernels.kv_write.tpu import write_chunks
from orca_jax.kernels.kv_write.tpu_quantised import write_quantised
from orca_jax.kernels.ragged_attention.tpu.blocks import Blocks
from orca_jax.kernels.ragged_attention.tpu.chunks import attend_chunks
from orca_jax.kernels.ragged_attention.tpu.increments import attend_increments
from orca_jax.kernels.ragged_attention.tpu.plan import Plan, blocks_for, chunk_block, plan_attention
from orca_jax.kernels.ragged_attention.tpu.shape import Shape

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
    reason = refusal(q, pages)
    if reason is not None or not isinstance(pages, PackedPages):
        raise NotImplementedError(reason)
    blocks = blocks or blocks_for(q, pages)
    plan = plan_attention(q, pages, page_table, query_start, query_len, context_len, blocks)
    call = _Call(q, pages, plan, blocks, scale, sliding_window, soft_cap, interpret)
    out, pages = call.increments(pages, None)
    return call.merged(out, call.chunks(pages))


def write_and_attend_tpu(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: PackedPages,
    plan: Plan,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "T H D"], PackedPages]:
    """`write_kv` and `ragged_attention` at once: the kernel of increments writes what it has just read.

    A token may change the scale of its page, and so pages of 8 bits are written by a kernel of their own before.

    Args:
        plan: the iteration's, of `plan_attention`, in the layer's pages.
        blocks: those of the plan, where it has others than the table's.

    The others are those of `write_kv` and `ragged_attention`; pages are of a kind that `refusal` has nothing against.
    """
    call = _Call(q, pages, plan, blocks or blocks_for(q, pages), scale, sliding_window, soft_cap, interpret)
    pieces = plan.num_pieces, plan.pieces
    if pages.is_quantised:
        new = slots(k, v, k.dtype)
        pages = write_quantised(pages, new, *pieces, head_dim=q.shape[2], interpret=interpret)
        out, pages = call.increments(pages, None)
    else:
        new = slots(k, v, pages.dtype)
        out, pages = call.increments(pages, new)
        if q.shape[0] > 1:
            write = partial(write_chunks, interpret=interpret)
            pages = lax.cond(plan.has_chunks, lambda pages: write(pages, new, *pieces), lambda pages: pages, pages)
    return call.merged(out, call.chunks(pages)), pages


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> str | None:
    """Why the kernels cannot read such pages; None where they can."""
    if not isinstance(pages, PackedPages):
        return "attention 'tpu' reads packed pages only"
    least = tile_tokens(pages.dtype)
    if pages.page_size % least:
        return f"attention 'tpu' needs a page_size that is a multiple of {least}, not {pages.page_size}"
    return None


class _Call:
    """One call of both kernels."""

    def __init__(
        self,
        q: Float[Array, "T H D"],
        pages: PackedPages,
        plan: Plan,
        blocks: Blocks,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        interpret: Any,
    ) -> None:
        self.plan, self.blocks, self.num_tokens = plan, blocks, q.shape[0]
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
        return attend_increments(shape, self.q, pages, self.plan, new=new, **self.options)

    def chunks(self, pages: PackedPages) -> Float[Array, "T H D"] | None:
        """Outputs of the other rows; None where there is no room for any."""
        if self.num_tokens == 1:
            return None
        shape = replace(self.shape, query_block=chunk_block(self.blocks, self.num_tokens))
        attend = partial(attend_chunks, shape, self.q, pages, self.plan, **self.options)
        return lax.cond(self.plan.has_chunks, attend, lambda: jnp.zeros(self.q.shape, self.options["out_dtype"]))

    def merged(self, increments: Float[Array, "T H D"], chunks: Float[Array, "T H D"] | None) -> Float[Array, "T H D"]:
        """Outputs of all tokens, and zeros for padding."""
        token = jnp.arange(self.num_tokens)[:, None, None]
        out = increments if chunks is None else jnp.where(token < self.plan.num_increments, increments, chunks)
        # Blocks without a request are not visited, and what stands there may be anything.
        return jnp.where(token < self.plan.num_used, out, jnp.zeros_like(out))


attend = ragged_attention_tpu
"""The name that the table of backends expects, as are the next two."""


def prepare(
    q: jax.ShapeDtypeStruct,
    pages: KVPages,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
) -> Plan:
    """The plan of an iteration, in the first layer's pages.

    Raises:
        NotImplementedError: the pages are refused.
    """
    if (reason := refusal(q, pages)) is not None or not isinstance(pages, PackedPages):
        raise NotImplementedError(reason)
    return plan_attention(q, pages, page_table, query_start, query_len, context_len, blocks_for(q, pages))


def write_and_attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: PackedPages,
    plan: Plan,
    first_page: Int[Array, ""],
    *,
    scale: float,
) -> tuple[Float[Array, "T H D"], PackedPages]:
    """`write_and_attend_tpu` for the layer whose pages begin at `first_page`."""
    return write_and_attend_tpu(q, k, v, pages, plan.of_layer(first_page), scale=scale)
