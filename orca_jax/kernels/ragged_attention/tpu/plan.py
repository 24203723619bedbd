"""The requests of an iteration, prepared for the TPU kernels: computed once, because all layers need the same.

A TPU takes about 2,000 cycles for each small operation, and this preparation would be two dozen of them in each layer.
Kernels add the layer's first page when they fetch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from orca_jax.kernels.kv_pages import KVPages, RowArrays, TokenMajorPages, num_kv_heads
from orca_jax.kernels.kv_write.pieces import PagePieces, cut
from orca_jax.kernels.ragged_attention.tpu.blocks import BlockSizes, Heads, choose_blocks
from orca_jax.kernels.ragged_attention.tpu.shape import LANES

TABLE_BYTES = 512 << 10
"""Bytes of the largest page table in scalar memory; this has 1 MiB."""


class BlockRange(NamedTuple):
    """A range of query blocks, and the rows with queries in each block."""

    ends: Int[Array, "2"]  # first and last (exclusive) block
    num_blocks: Int[Array, ""]
    first_row: Int[Array, " B"]  # of each block
    end_row: Int[Array, " B"]  # exclusive


class Prepared(NamedTuple):
    """The requests of one iteration, as the TPU kernels of one layer take them."""

    lists: Int[Array, " RP"] | Int[Array, "L 1 128"]  # the page table, or lists of 128 pages
    start: Int[Array, " R"]
    length: Int[Array, " R"]
    context: Int[Array, " R"]
    num_increments: Int[Array, ""]  # rows with one query; they come first
    num_used: Int[Array, ""]  # tokens without the padding
    increments: BlockRange
    chunks: BlockRange
    num_pieces: Int[Array, ""]
    # Written by a kernel of their own: the pieces of chunks or, if pages are quantised, of all rows.
    pieces: PagePieces

    @property
    def has_increments(self) -> Bool[Array, ""]:
        """True if a row has one query."""
        return self.num_increments > 0

    @property
    def has_chunks(self) -> Bool[Array, ""]:
        """True if a row has several queries."""
        return self.chunks.num_blocks > 0

    def of_layer(self, first_page: Int[Array, ""]) -> "Prepared":
        """The same requests in another layer, with its pages from `first_page` on."""
        return self._replace(pieces=self.pieces._replace(first_page=first_page.reshape(1)))


def plan_attention(
    q: Float[Array, "T H D"] | jax.ShapeDtypeStruct,
    pages: KVPages,
    requests: RowArrays,
    blocks: BlockSizes,
) -> Prepared:
    """Cut the queries of an iteration into blocks, and its new tokens into pieces.

    Args:
        q: queries on one device, or their shape.
        pages: pages on one device, or their shapes.
        requests: the requests, in the pages of the first layer.
        blocks: the sizes of `blocks_for`, or others to try.
    """
    page_table, query_start, query_len, context_len = requests
    num_tokens = q.shape[0]
    num_increments = jnp.sum(query_len == 1, dtype=jnp.int32)
    written = query_len if pages.is_quantised else jnp.where(query_len > 1, query_len, 0)
    num_pieces, pieces = cut(pages.page_size, num_tokens, requests._replace(query_len=written))
    rows = query_start, query_len, num_increments
    return Prepared(
        _page_lists(page_table),
        query_start,
        query_len,
        context_len,
        num_increments,
        jnp.sum(query_len, dtype=jnp.int32),
        _increment_blocks(
            blocks.increment_rows, min(num_tokens, query_len.shape[0]), num_increments
        ),
        _chunk_blocks(chunk_block(blocks, num_tokens), num_tokens, *rows),
        num_pieces,
        pieces,
    )


def blocks_for(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> BlockSizes:
    """The block sizes for these heads on this machine's TPU. Without a TPU here, the rule decides, not the table."""
    device = jax.devices()[0].device_kind
    kv_heads = num_kv_heads(pages, q.shape[2])
    groups = q.shape[1] // kv_heads
    itemsize = jnp.dtype(pages.dtype).itemsize
    has_values = isinstance(pages, TokenMajorPages)
    heads = Heads(
        device, kv_heads, groups, q.shape[2], pages.page_size, itemsize, has_values=has_values
    )
    return choose_blocks(heads)


def chunk_block(blocks: BlockSizes, num_tokens: int) -> int:
    """Tokens in a query block of chunks: `query_block`, or fewer if the batch has fewer tokens."""
    return min(blocks.query_block, pl.cdiv(num_tokens, 16) * 16)


def _page_lists(
    page_table: Int[Array, "R P"],
) -> Int[Array, " RP"] | Int[Array, "L 1 128"]:
    """The page table, if it fits scalar memory; else with each row cut into lists of 128 pages."""
    rows, width = page_table.shape
    if 4 * rows * width <= TABLE_BYTES:
        return page_table.reshape(-1)
    padded = jnp.pad(page_table, ((0, 0), (0, -width % LANES)))
    return padded.reshape(rows * (padded.shape[1] // LANES), 1, LANES)


def _increment_blocks(size: int, most: int, count: jax.Array) -> BlockRange:
    """Blocks `0 : end`, with the first and last (exclusive) row of each: row r has token r."""
    first = size * jnp.arange(pl.cdiv(most, size), dtype=jnp.int32)
    end = pl.cdiv(count, size)
    return BlockRange(
        jnp.stack([jnp.zeros_like(count), end]),
        end,
        first,
        jnp.minimum(first + size, count),
    )


def _chunk_blocks(
    size: int, num_tokens: int, start: jax.Array, length: jax.Array, increments: jax.Array
) -> BlockRange:
    """Blocks from the first token of the first chunk on, with the first and last (exclusive) chunk row of each."""
    begin = size * jnp.arange(pl.cdiv(num_tokens, size), dtype=jnp.int32)[:, None]
    end = start + length
    is_chunk = length > 1
    first = increments + jnp.sum(is_chunk & (end <= begin), axis=1, dtype=jnp.int32)
    last = increments + jnp.sum(is_chunk & (start < begin + size), axis=1, dtype=jnp.int32)
    total = jnp.sum(length, dtype=jnp.int32)
    lower = increments // size
    upper = jnp.where(total > increments, pl.cdiv(total, size), lower)
    return BlockRange(jnp.stack([lower, upper]), upper - lower, first, last)
