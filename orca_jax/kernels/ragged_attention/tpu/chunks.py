"""Attention of chunks on TPUs: rows with several queries.

    HBM   pages and page lists, as in `walk.py`
    VMEM  of a block of tokens: queries [K, M, X], outputs of the same shape; M = tokens * G; X = D, or 2 D if D is not
          a multiple of 128: then the lanes of V share registers with those of K, and queries are zero there

    for block of tokens                  the grid, from the first token of the first chunk on
        for row with tokens in it        one set of sums for all rows of the block
            for part of its pages        large parts if all queries see all tokens; otherwise small ones with masks
                for head in KV heads     scores of [M, tokens]

In a long prompt all queries of a block see nearly all tokens before it, and masks would cost as many cycles as the
products. Large parts need fewer maxima across lanes, and the sums pass through registers less often. If a block has
queries of several rows, each row is visited with the other rows' queries masked, so their sums do not change. The
outputs are written when the block is done.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from orca_jax.kernels.kv_pages import KVPages
from orca_jax.kernels.ragged_attention.tpu.fetches import Step
from orca_jax.kernels.ragged_attention.tpu.launch import launch
from orca_jax.kernels.ragged_attention.tpu.plan import Prepared
from orca_jax.kernels.ragged_attention.tpu.shape import LANES, SUBLANES, TpuShape
from orca_jax.kernels.ragged_attention.tpu.walk import Kernel, Part, Refs, part_of, walk


def attend_chunks(
    shape: TpuShape,
    q: Float[Array, "T H D"],
    pages: KVPages,
    prepared: Prepared,
    sinks: Float[Array, " H"] | None = None,
    work: "type[Chunks] | None" = None,
    **options: Any,
) -> Float[Array, "T H D"]:
    """Compute the outputs of rows with several queries; those of other rows are meaningless.

    Args:
        shape: the constants of the kernel; `query_block` is the number of tokens in a block.
        q: queries, scaled.
        pages: the KV cache; it already holds these tokens.
        prepared: the requests.
        sinks: those of `Scores`, scaled as the queries.
        work: the work of the kernel; None for keys and values.
        options: other arguments of `launch`.
    """
    queries = _by_head(shape, q)
    queries = jnp.pad(
        queries, ((0, 0), (0, -queries.shape[1] % (shape.query_block * shape.groups)), (0, 0))
    )
    if sinks is not None:  # whole registers of them
        repeats = SUBLANES // math.gcd(shape.groups, SUBLANES)
        tiles = jnp.tile(sinks.reshape(shape.num_kv_heads, shape.groups), (1, repeats))
        options["sinks"] = jnp.broadcast_to(tiles[..., None], (*tiles.shape, LANES))
    kernel = partial(_kernel, work or Chunks)
    out, _ = launch(
        kernel, "chunks", shape, prepared.chunks, queries, pages, prepared, axis=1, **options
    )
    return _by_token(shape, out)[: q.shape[0]]


def _kernel(work: "type[Chunks]", refs: Refs) -> None:
    refs.softmax.clear()
    walk(
        refs,
        work(refs, (pl.program_id(0) + refs.rows.first_block) * refs.pages.shape.query_block),
    )
    refs.out[...] = refs.softmax.result().astype(refs.out.dtype)


@dataclass(frozen=True)
class Chunks(Kernel):
    """The work on a block of tokens, with sums `[K, M, X]`; the G queries of a token are adjacent."""

    refs: Refs
    begin_of_block: jax.Array

    def visit(self, step: Step, buffer: jax.Array) -> None:
        pages = self.refs.pages
        shape = self.refs.pages.shape
        small = shape.compute_tokens
        large = shape.whole_pages * shape.page_size
        pages.clear_passed(step, buffer)
        first_whole, end_whole = (
            jnp.clip(x, 0, shape.fetch_tokens) for x in self._seen_by_all(step)
        )
        first_large = pl.cdiv(first_whole, large)
        end_large = jnp.maximum(end_whole // large, first_large)
        lax.fori_loop(
            first_large,
            end_large,
            lambda index, _: self.add_part(
                part_of(pages, step, buffer, index, shape.whole_pages), None
            ),
            None,
        )
        # Then the small parts around these; there are some before them only if there is a window.
        lower, upper = self.refs.rows.tokens(step)
        first = lower // small
        end = pl.cdiv(upper, small)
        before = jnp.maximum(jnp.minimum(first_large * (large // small), end) - first, 0)
        after = jnp.maximum(end_large * (large // small), first)

        def masked(number: jax.Array, _: None) -> None:
            index = jnp.where(number < before, first + number, after + number - before)
            part = part_of(pages, step, buffer, index, shape.compute_pages)
            self.add_part(part, self._visible(step, part))

        lax.fori_loop(0, before + jnp.maximum(end - after, 0), masked, None)

    def _seen_by_all(self, step: Step) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) token of a fetch visible to every query of the block; none if it has several rows.

        If the row is the only one in the block, the other queries do not matter: they are padding or increments.
        """
        block, row, fetch = step
        rows = self.refs.rows
        shape = self.refs.pages.shape
        is_alone = rows.end_row[block] - rows.first_row[block] == 1
        first_query = self.begin_of_block - rows.start[row]
        # of the row's queries
        first = rows.context[row] - rows.length[row] - fetch * shape.fetch_tokens
        end = jnp.where(is_alone, first + jnp.maximum(first_query, 0) + 1, 0)
        if not shape.has_window:
            return jnp.zeros_like(end), end
        last_query = jnp.minimum(first_query + shape.query_block, rows.length[row]) - 1
        return first + last_query + 1 - rows.window[0], end

    def _visible(self, step: Step, part: Part) -> jax.Array:
        """Mask of the tokens of a part visible to each query; queries of other rows see none."""
        rows = self.refs.rows
        row = step[1]
        shape = part.shape
        num_queries = self.refs.q.shape[1]
        query = lax.broadcasted_iota(jnp.int32, (num_queries, part.size), 0) // shape.groups
        index = self.begin_of_block - rows.start[row] + query
        last = rows.context[row] - rows.length[row] + index  # last position that a query sees
        key = part.positions(num_queries)
        visible = (index >= 0) & (index < rows.length[row]) & (key <= last)
        if not shape.has_window:
            return visible
        return visible & (key > last - rows.window[0])

    def add_part(self, part: Part, visible: jax.Array | None) -> None:
        """Add a part to the sums of all heads."""
        shape = part.shape
        for head in range(shape.num_kv_heads):
            k_lanes, v_lanes = shape.kv_lanes(2 * shape.head_dim * head, 1)
            k = part.read(k_lanes)
            v = k if v_lanes == k_lanes else part.read(v_lanes)
            self.refs.softmax.add_tokens(head, self.refs.q[head], k, v, visible)


def _by_head(shape: TpuShape, q: Float[Array, "T H D"]) -> Float[Array, "K TG X"]:
    """Lay out queries by KV head, with the G queries of a token adjacent."""
    split = q.reshape(q.shape[0], shape.num_kv_heads, shape.groups, shape.head_dim).transpose(
        1, 0, 2, 3
    )
    padded = jnp.pad(split, ((0, 0), (0, 0), (0, 0), (0, shape.lanes - shape.head_dim)))
    return padded.reshape(shape.num_kv_heads, -1, shape.lanes)


def _by_token(shape: TpuShape, out: Float[Array, "K TG X"]) -> Float[Array, "T H D"]:
    """Lay out outputs by token again."""
    split = out[..., -shape.head_dim :].reshape(
        shape.num_kv_heads, -1, shape.groups, shape.head_dim
    )
    return split.transpose(1, 0, 2, 3).reshape(split.shape[1], -1, shape.head_dim)
