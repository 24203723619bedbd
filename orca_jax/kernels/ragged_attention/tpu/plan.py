"""What TPU kernels need to know of an iteration's requests: the same for all layers, so it is found out once.

Every small operation takes a TPU some 2,000 cycles, and these would be two dozen of them in each layer. Where a layer's
own pages begin the kernels add where they ask for a page.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from orca_jax.kernels.kv_pages import PackedPages, num_kv_heads
from orca_jax.kernels.kv_write.pieces import Pieces, cut
from orca_jax.kernels.ragged_attention.tpu.blocks import Blocks, Heads, choose_blocks
from orca_jax.kernels.ragged_attention.tpu.shape import LANES


class Span(NamedTuple):
    """A run of query blocks, and the rows that have queries in each."""

    ends: Int[Array, "2"]  # first and last (exclusive) block
    first_row: Int[Array, " B"]  # of each block
    end_row: Int[Array, " B"]


class Plan(NamedTuple):
    """Of one iteration, and of one layer in it."""

    lists: Int[Array, "L 1 128"]  # the page table, 128 pages a line
    start: Int[Array, " R"]
    length: Int[Array, " R"]
    context: Int[Array, " R"]
    num_increments: Int[Array, ""]  # rows with one query, which come first
    num_used: Int[Array, ""]  # tokens that are no padding
    increments: Span
    chunks: Span
    num_pieces: Int[Array, ""]
    pieces: (
        Pieces  # what is written to pages by a kernel of its own: of chunks, or of all rows where pages are quantised
    )

    @property
    def has_chunks(self) -> Bool[Array, ""]:
        """Whether a row has several queries."""
        return self.chunks.ends[0] < self.chunks.ends[1]

    def of_layer(self, first_page: Int[Array, ""]) -> "Plan":
        """The same requests, in pages that begin elsewhere."""
        return self._replace(pieces=self.pieces._replace(first_page=first_page.reshape(1)))


def plan_attention(
    q: Float[Array, "T H D"] | jax.ShapeDtypeStruct,
    pages: PackedPages,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    blocks: Blocks,
) -> Plan:
    """Cut an iteration's requests into blocks of queries, and what they write into pieces.

    Args:
        q: queries on one device, or their shape.
        pages: of one device, or their shapes.
        page_table: pages of each request in the first layer.
        query_start: as for `ragged_attention`, and so are the next two.
        query_len: number of queries.
        context_len: tokens in the cache after this iteration.
        blocks: what `blocks_for` says, or others to try.
    """
    num_tokens, num_increments = q.shape[0], jnp.sum(query_len == 1, dtype=jnp.int32)
    written = query_len if pages.is_quantised else jnp.where(query_len > 1, query_len, 0)
    num_pieces, pieces = cut(pages.page_size, num_tokens, page_table, query_start, written, context_len)
    rows = query_start, query_len, num_increments
    return Plan(
        _page_lists(page_table),
        query_start,
        query_len,
        context_len,
        num_increments,
        jnp.sum(query_len, dtype=jnp.int32),
        _increment_blocks(blocks.increment_rows, min(num_tokens, query_len.shape[0]), num_increments),
        _chunk_blocks(chunk_block(blocks, num_tokens), num_tokens, *rows),
        num_pieces,
        pieces,
    )


def blocks_for(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: PackedPages) -> Blocks:
    """The sizes for these heads; a program that is compiled for another machine's TPU gets the rule's."""
    device = jax.devices()[0].device_kind if jax.default_backend() == "tpu" else ""
    kv_heads = num_kv_heads(pages, q.shape[2])
    groups, itemsize = q.shape[1] // kv_heads, jnp.dtype(pages.dtype).itemsize
    return choose_blocks(Heads(device, kv_heads, groups, q.shape[2], pages.page_size, itemsize))


def chunk_block(blocks: Blocks, num_tokens: int) -> int:
    """Tokens in a block of chunks, of which there may be few."""
    return min(blocks.query_block, pl.cdiv(num_tokens, 16) * 16)


def _page_lists(page_table: Int[Array, "R P"]) -> Int[Array, "L 1 128"]:
    """The page table, a row in lines of 128 pages."""
    rows, width = page_table.shape
    padded = jnp.pad(page_table, ((0, 0), (0, -width % LANES)))
    return padded.reshape(rows * (padded.shape[1] // LANES), 1, LANES)


def _increment_blocks(size: int, most: int, count: jax.Array) -> Span:
    """Blocks `0 : end`, and first and last row of each: row r has token r."""
    first = size * jnp.arange(pl.cdiv(most, size), dtype=jnp.int32)
    return Span(jnp.stack([jnp.zeros_like(count), pl.cdiv(count, size)]), first, jnp.minimum(first + size, count))


def _chunk_blocks(size: int, num_tokens: int, start: jax.Array, length: jax.Array, increments: jax.Array) -> Span:
    """Blocks from the first chunk's first token on, and the first and last row of each that is a chunk."""
    begin = size * jnp.arange(pl.cdiv(num_tokens, size), dtype=jnp.int32)[:, None]
    end, is_chunk = start + length, length > 1
    first = increments + jnp.sum(is_chunk & (end <= begin), axis=1, dtype=jnp.int32)
    last = increments + jnp.sum(is_chunk & (start < begin + size), axis=1, dtype=jnp.int32)
    total = jnp.sum(length, dtype=jnp.int32)
    lower = increments // size
    upper = jnp.where(total > increments, pl.cdiv(total, size), lower)
    return Span(jnp.stack([lower, upper]), first, last)
