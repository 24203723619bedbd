"""Attention of chunks on TPUs: rows with several queries.

    HBM   pages and page lists, as in `tpu_walk.py`
    VMEM  of a block of tokens: queries [K, M, X], outputs of the same shape; M = tokens * G, X = D, or 2 D where D is
          no multiple of 128: zeros for V's lanes, which share registers with K's

    for block of tokens                  the grid, from the first chunk's first token on
        for row with tokens in it        the sums of the block are kept for all its rows together
            for part of its pages        large ones where all queries see all tokens, others with masks
                for head in KV heads     scores of [M, tokens]

Of a long prompt nearly all is seen whole, and masks would cost as much as the products. Large parts spare maxima
across lanes, and turns of the sums through registers. Where a block has several requests each is visited with the
others' queries masked, which leaves their sums alone; nothing is written until the block is done.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from orca_jax.kernels.kv_pages import PackedPages
from orca_jax.kernels.ragged_attention.tpu.launch import launch
from orca_jax.kernels.ragged_attention.tpu.plan import Plan
from orca_jax.kernels.ragged_attention.tpu.shape import Shape
from orca_jax.kernels.ragged_attention.tpu.walk import Item, Kernel, Part, Refs, part_of, walk


def attend_chunks(
    shape: Shape, q: Float[Array, "T H D"], pages: PackedPages, plan: Plan, **options: Any
) -> Float[Array, "T H D"]:
    """Outputs of the tokens of rows with several queries.

    Args:
        shape: with tokens of a query block as `query_block`.
        q: queries, scaled.
        pages: K and V, those of these tokens too.
        plan: the requests.
        options: of `launch`.
    """
    queries = _by_head(shape, q)
    queries = jnp.pad(queries, ((0, 0), (0, -queries.shape[1] % (shape.query_block * shape.groups)), (0, 0)))
    out, _ = launch(_kernel, "chunks", shape, plan.chunks, queries, pages, plan, axis=1, **options)
    return _by_token(shape, out)[: q.shape[0]]


def _kernel(refs: Refs) -> None:
    refs.softmax.clear()
    walk(refs, _Chunks(refs, (pl.program_id(0) + refs.rows.first_block) * refs.pages.shape.query_block))
    refs.out[...] = refs.softmax.result().astype(refs.out.dtype)


@dataclass(frozen=True)
class _Chunks(Kernel):
    """A block has `[K, M, X]`, queries of a token together."""

    refs: Refs
    begin_of_block: jax.Array

    def visit(self, item: Item, slot: jax.Array) -> None:
        pages, shape = self.refs.pages, self.refs.pages.shape
        small, large = shape.compute_tokens, shape.whole_pages * shape.page_size
        first_whole, end_whole = (jnp.clip(x, 0, shape.fetch_tokens) for x in self._seen_by_all(item))
        first_large = pl.cdiv(first_whole, large)
        end_large = jnp.maximum(end_whole // large, first_large)
        lax.fori_loop(
            first_large,
            end_large,
            lambda index, _: self._add(part_of(pages, item, slot, index, shape.whole_pages), None),
            None,
        )
        # The parts around these: before them there are some where there is a window.
        lower, upper = self.refs.rows.tokens(item)
        first, end = lower // small, pl.cdiv(upper, small)
        before = jnp.maximum(jnp.minimum(first_large * (large // small), end) - first, 0)
        after = jnp.maximum(end_large * (large // small), first)

        def masked(turn: jax.Array, _: None) -> None:
            index = jnp.where(turn < before, first + turn, after + turn - before)
            part = part_of(pages, item, slot, index, shape.compute_pages)
            self._add(part, self._visible(item, part))

        lax.fori_loop(0, before + jnp.maximum(end - after, 0), masked, None)

    def _seen_by_all(self, item: Item) -> tuple[jax.Array, jax.Array]:
        """First and last (exclusive) token of a fetched block that every query of the row in this block of tokens sees.

        Where the row is the only one in it, what others would get does not matter: it is padding, or increments.
        """
        block, row, fetch = item
        rows, shape = self.refs.rows, self.refs.pages.shape
        is_alone = rows.end_row[block] - rows.first_row[block] == 1
        first_query = self.begin_of_block - rows.start[row]
        first = rows.context[row] - rows.length[row] - fetch * shape.fetch_tokens  # of the row's queries
        end = jnp.where(is_alone, first + jnp.maximum(first_query, 0) + 1, 0)
        if shape.sliding_window is None:
            return jnp.zeros_like(end), end
        last_query = jnp.minimum(first_query + shape.query_block, rows.length[row]) - 1
        return first + last_query + 1 - shape.sliding_window, end

    def _visible(self, item: Item, part: Part) -> jax.Array:
        """Which tokens of a part each query sees; those of other rows see none."""
        rows, row, shape = self.refs.rows, item[1], part.shape
        num_queries = self.refs.q.shape[1]
        query = lax.broadcasted_iota(jnp.int32, (num_queries, part.size), 0) // shape.groups
        index = self.begin_of_block - rows.start[row] + query
        last = rows.context[row] - rows.length[row] + index  # position that a query sees at most
        key = part.positions(num_queries)
        visible = (index >= 0) & (index < rows.length[row]) & (key <= last)
        return visible if shape.sliding_window is None else visible & (key > last - shape.sliding_window)

    def _add(self, part: Part, visible: jax.Array | None) -> None:
        """All heads of a part."""
        shape = part.shape
        for head in range(shape.num_kv_heads):
            k_lanes, v_lanes = shape.kv_lanes(2 * shape.head_dim * head, 1)
            k = part.read(k_lanes)
            v = k if v_lanes == k_lanes else part.read(v_lanes)
            self.refs.softmax.add(head, self.refs.q[head], k, v, visible)


def _by_head(shape: Shape, q: Float[Array, "T H D"]) -> Float[Array, "K TG X"]:
    """Queries of chunks, the G of a token side by side."""
    split = q.reshape(q.shape[0], shape.num_kv_heads, shape.groups, shape.head_dim).transpose(1, 0, 2, 3)
    padded = jnp.pad(split, ((0, 0), (0, 0), (0, 0), (0, shape.lanes - shape.head_dim)))
    return padded.reshape(shape.num_kv_heads, -1, shape.lanes)


def _by_token(shape: Shape, out: Float[Array, "K TG X"]) -> Float[Array, "T H D"]:
    """Outputs of chunks."""
    split = out[..., -shape.head_dim :].reshape(shape.num_kv_heads, -1, shape.groups, shape.head_dim)
    return split.transpose(1, 0, 2, 3).reshape(split.shape[1], -1, shape.head_dim)
