"""Ragged attention for TPUs, in Pallas (Mosaic), over token-major pages.

The first rows of an iteration are its increments, with the first tokens as their queries; then come the chunks. Each
kind has a kernel and its own range of query blocks. A range without blocks runs no program, and without chunks the
inputs of their kernel are not laid out either:

    increments  `increments.py`   bound by memory: eight rows at a time, several KV heads in one product
    chunks      `chunks.py`       bound by products: many queries of one head at a time

Both run the loop of `walk.py` and fetch pages while they compute. Both are called through `launch.py` and share the
online softmax of `softmax.py`. `plan.py` prepares the requests once for all layers; `blocks.py` chooses how many pages
are fetched and multiplied at a time.

Scores and sums are float32. Pages in bfloat16 are multiplied as they are, with the weights rounded to bfloat16; pages
of 8 bits become bfloat16 first.
"""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import (
    KVPages,
    RowArrays,
    TokenMajorPages,
    lack_of_tiles,
    num_kv_heads,
    slots,
)
from orca_jax.kernels.kv_write.tpu import write_chunks
from orca_jax.kernels.kv_write.tpu_quantised import write_quantised
from orca_jax.kernels.ragged_attention.api import NO_WINDOW, Scores
from orca_jax.kernels.ragged_attention.tpu.blocks import BlockSizes
from orca_jax.kernels.ragged_attention.tpu.chunks import Chunks, attend_chunks
from orca_jax.kernels.ragged_attention.tpu.increments import Increments, attend_increments
from orca_jax.kernels.ragged_attention.tpu.plan import (
    Prepared,
    blocks_for,
    chunk_block,
    plan_attention,
)
from orca_jax.kernels.ragged_attention.tpu.shape import TpuShape

_LOG2E = math.log2(math.e)


def write_and_attend_tpu(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: TokenMajorPages,
    prepared: Prepared,
    scores: Scores,
    *,
    blocks: BlockSizes | None = None,
    interpret: Any = False,
) -> tuple[Float[Array, "T H D"], TokenMajorPages]:
    """Do the work of `write_kv` and `ragged_attention`: the kernel of increments writes new tokens while it attends.

    Pages of 8 bits are written by another kernel before, because a token may change the scale of its page.

    Args:
        prepared: result of `plan_attention` for the iteration, with the first page of the layer.
        blocks: the block sizes of `prepared`; None for those of the table or the rule.

    The other arguments are those of `write_kv` and `ragged_attention`. `refusal` must accept the pages.
    """
    call = AttentionCall(q, pages, prepared, scores, blocks or blocks_for(q, pages), interpret)
    pieces = prepared.num_pieces, prepared.pieces
    if pages.is_quantised:
        new = slots(k, v, k.dtype)
        pages = write_quantised(pages, new, *pieces, head_dim=q.shape[2], interpret=interpret)
        out, pages = call.increments(pages, None)
    else:
        new = jnp.concatenate([k, v], axis=2).astype(pages.dtype).reshape(k.shape[0], -1)
        out, pages = call.increments(pages, new)
        if q.shape[0] > 1:
            pages = write_chunks(pages, new, *pieces, interpret=interpret)
    return call.with_chunks(out, pages), pages


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> str | None:
    """The reason why the kernels cannot read these pages; None if they can."""
    reason = lack_of_tiles(pages)
    return reason and f"attention 'tpu' {reason}"


class AttentionCall:
    """One call of both kernels: their common constants and scaled queries."""

    of_increments = Increments
    of_chunks = Chunks
    refusal = staticmethod(refusal)

    @classmethod
    def attend(
        cls,
        q: Float[Array, "T H D"],
        pages: KVPages,
        requests: RowArrays,
        scores: Scores,
        *,
        blocks: BlockSizes | None = None,
        interpret: Any = False,
    ) -> Float[Array, "T H D"]:
        """Compute ragged attention on a TPU; the other arguments and the result are those of `ragged_attention`.

        Args:
            blocks: block sizes; None takes those of the table or the rule.
            interpret: the argument of `pallas_call`, to run without a TPU.

        Raises:
            NotImplementedError: `refusal` does not accept the pages.
        """
        prepared = cls.prepare(q, pages, requests, blocks=blocks)
        return cls.attend_prepared(q, pages, prepared, scores, blocks=blocks, interpret=interpret)

    @classmethod
    def attend_prepared(
        cls,
        q: Float[Array, "T H D"],
        pages: KVPages,
        prepared: Prepared,
        scores: Scores,
        *,
        blocks: BlockSizes | None = None,
        interpret: Any = False,
    ) -> Float[Array, "T H D"]:
        """Attend without writing, by a plan with the first page of the layer; other arguments are as for `attend`."""
        call = cls(q, pages, prepared, scores, blocks or blocks_for(q, pages), interpret)
        out, _ = call.increments(pages, None)
        return call.with_chunks(out, pages)

    @classmethod
    def prepare(
        cls,
        q: Float[Array, "T H D"] | jax.ShapeDtypeStruct,
        pages: KVPages,
        requests: RowArrays,
        *,
        blocks: BlockSizes | None = None,
    ) -> Prepared:
        """Prepare the requests of an iteration for all layers with this page table.

        Raises:
            NotImplementedError: `refusal` does not accept the pages.
        """
        if (reason := cls.refusal(q, pages)) is not None:
            raise NotImplementedError(reason)
        return plan_attention(q, pages, requests, blocks or blocks_for(q, pages))

    def __init__(
        self,
        q: Float[Array, "T H D"],
        pages: KVPages,
        prepared: Prepared,
        scores: Scores,
        blocks: BlockSizes,
        interpret: Any,
    ) -> None:
        self.prepared = prepared
        self.blocks = blocks
        self.num_tokens = q.shape[0]
        is_exact = q.dtype == jnp.float32 and pages.dtype == jnp.float32
        kv_heads = num_kv_heads(pages, q.shape[2])
        self.shape = TpuShape(
            num_kv_heads=kv_heads,
            groups=q.shape[1] // kv_heads,
            head_dim=q.shape[2],
            page_size=pages.page_size,
            page_dtype=pages.dtype,
            query_block=chunk_block(self.blocks, self.num_tokens),
            fetch_pages=self.blocks.fetch_pages,
            compute_pages=self.blocks.compute_pages,
            whole_pages=self.blocks.whole_pages,
            has_window=scores.window is not None,
            soft_cap=scores.soft_cap,
            has_sinks=scores.sinks is not None,
            compute_dtype=jnp.float32 if is_exact else jnp.bfloat16,
            is_quantised=pages.is_quantised,
            has_values=isinstance(pages, TokenMajorPages),
        )
        # Weights are powers of two, which saves one product for each score.
        factor = scores.scale if scores.soft_cap is not None else scores.scale * _LOG2E
        self.q = (q.astype(jnp.float32) * factor).astype(self.shape.compute_dtype)
        self.sinks = None if scores.sinks is None else scores.sinks.astype(jnp.float32) * _LOG2E
        window = jnp.asarray(
            NO_WINDOW if scores.window is None else scores.window, jnp.int32
        ).reshape(1)
        self.options: dict[str, Any] = {
            "window": window,
            "out_dtype": q.dtype,
            "interpret": interpret,
        }

    def increments[P: KVPages](
        self, pages: P, new: Float[Array, "T W"] | None
    ) -> tuple[Float[Array, "T H D"], P]:
        """Outputs of the rows with one query, and the pages; these contain the tokens of `new` if it is given."""
        shape = replace(
            self.shape,
            query_block=self.blocks.increment_rows,
            fetch_pages=self.blocks.increment_pages,
            compute_pages=self.blocks.part_pages,
            buffers=self.blocks.buffers,
            is_single=True,
            is_writing=new is not None,
        )

        def attend(pages: P) -> tuple[Float[Array, "T H D"], P]:
            options = {**self.options, "new": new, "sinks": self.sinks, "work": self.of_increments}
            return attend_increments(shape, self.q, pages, self.prepared, **options)

        # A grid of zero programs must not run: the pipeline around a kernel fetches its first block before them.
        nothing = jnp.zeros(self.q.shape, self.options["out_dtype"])
        return lax.cond(self.prepared.has_increments, attend, lambda pages: (nothing, pages), pages)

    def with_chunks(
        self, increments: Float[Array, "T H D"], pages: KVPages
    ) -> Float[Array, "T H D"]:
        """Outputs of all tokens, with zeros for padding.

        Args:
            increments: outputs of the rows with one query.
            pages: the KV cache with all new tokens.
        """
        token = jnp.arange(self.num_tokens)[:, None, None]

        def attend() -> Float[Array, "T H D"]:
            return attend_chunks(
                self.shape,
                self.q,
                pages,
                self.prepared,
                self.sinks,
                self.of_chunks,
                **self.options,
            )

        out = increments
        if self.num_tokens > 1:
            nothing = jnp.zeros(self.q.shape, self.options["out_dtype"])
            chunks = lax.cond(self.prepared.has_chunks, attend, lambda: nothing)
            out = jnp.where(token < self.prepared.num_increments, increments, chunks)
        # Blocks without a request are not visited: their outputs are undefined memory.
        return jnp.where(token < self.prepared.num_used, out, jnp.zeros_like(out))


attend = AttentionCall.attend
attend_prepared = AttentionCall.attend_prepared
prepare = AttentionCall.prepare


def write_and_attend(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K D"],
    pages: TokenMajorPages,
    prepared: Prepared,
    first_page: Int[Array, ""],
    scores: Scores,
) -> tuple[Float[Array, "T H D"], TokenMajorPages]:
    """Call `write_and_attend_tpu` for the layer with pages from `first_page` on."""
    return write_and_attend_tpu(q, k, v, pages, prepared.of_layer(first_page), scores)
