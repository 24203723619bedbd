"""The work of an iteration for the GPU kernels (`hopper/`, `triton.py`): pieces of contexts and tiles of queries.

Both lists have the greatest length that may be needed, and a count of their valid entries: shapes depend only on T
and R.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from orca_jax.kernels.kv_pages import RowArrays
from orca_jax.kernels.ragged_attention.api import NO_WINDOW, Scores
from orca_jax.kernels.work_list import lay_out
from orca_jax.values.platforms import platform_of

# tokens; in a shorter piece the partial result costs more than a tenth of its K and V
_SHORTEST_PIECE = 128

ROWS = 64  # rows of a wgmma
TILE = 2 * ROWS  # queries of a chunk that a thread block processes at once


class PipelineSize(NamedTuple):
    """Size of the pipeline that moves K and V through shared memory."""

    block: int  # tokens fetched and multiplied together
    stages: int  # blocks in shared memory at once


# By head dim: 128 KiB in flight.
INCREMENT_BLOCKS = {64: PipelineSize(128, 4), 128: PipelineSize(64, 4)}
CHUNK_BLOCKS = PipelineSize(128, 2)
ITEMS = 4  # of increments for each multiprocessor, beside one for each row


def multiprocessors_here() -> int:
    """The number of multiprocessors of this process's GPUs: 114 in an H100 PCIe, 132 in an H100 SXM or H200.

    Without a GPU here, for compilation only, it is 132.
    """
    device = jax.devices()[0]
    known = platform_of(device).has_multiprocessors
    return int((known and getattr(device, "core_count", None)) or 132)


class ContextPieces(NamedTuple):
    """Contexts of increments, cut into pieces so that every thread block has work."""

    fields: Int[Array, "4 I"]  # row, first token, end, first token visible to the query
    total: Int[Array, " 1"]  # number of valid pieces among the I
    begin: Int[Array, " R"]  # first piece of each row
    number: Int[Array, " R"]  # number of pieces of each row; 0 for rows that are not increments


def most_pieces(rows: int, num_kv_heads: int, multiprocessors: int) -> int:
    """Length of the list of pieces: one for each row, and `ITEMS` items (piece, KV head) for each multiprocessor."""
    return rows + pl.cdiv(ITEMS * multiprocessors, num_kv_heads)


def refuse_traced(scores: Scores, name: str) -> None:
    """Raise NotImplementedError if a window is not a constant: the kernels are compiled for one window."""
    if scores.layer_window is not None:
        raise NotImplementedError(
            f"attention {name!r} needs a window known at compile time; unroll the layers"
        )


def cut_contexts(
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    num_pieces: int,
    block: int,
    sliding_window: int | None,
) -> ContextPieces:
    """Cut contexts into pieces of one length, the shortest `_SHORTEST_PIECE * 2**i` with at most `num_pieces` pieces.

    Args:
        query_len: number of queries of each row; only rows with one query are cut.
        context_len: number of tokens of each row.
        num_pieces: the most pieces in all; at least R.
        block: pieces begin at multiples of this number of tokens.
        sliding_window: window of the query; tokens before it are not part of any piece.
    """
    rows = query_len.shape[0]
    assert num_pieces >= rows, "every row needs a piece"
    low = jnp.maximum(context_len - (sliding_window or NO_WINDOW), 0)
    base = low - low % block
    lengths = _SHORTEST_PIECE * 2 ** jnp.arange(24, dtype=jnp.int32)
    counts = jnp.where(query_len == 1, pl.cdiv(context_len - base, lengths[:, None]), 0)  # [24, R]
    choice = jnp.argmax(counts.sum(axis=1) <= num_pieces)
    length = lengths[choice]
    count = counts[choice]
    row, index, begin, total = lay_out(count, num_pieces)
    first = base[row] + index * length
    fields = jnp.stack([row, first, jnp.minimum(first + length, context_len[row]), low[row]])
    return ContextPieces(fields, total, begin, count)


class Tiles(NamedTuple):
    """Queries of chunks, cut into tiles. A tile belongs to one request."""

    # row, first query, number of queries, position of the first, first token, context length
    fields: Int[Array, "6 I"]
    total: Int[Array, " 1"]


def cut_queries(
    requests: RowArrays, *, size: int, num_tokens: int, block: int, sliding_window: int | None
) -> Tiles:
    """Cut the requests with several queries into tiles of up to `size` consecutive queries.

    Args:
        requests: the requests; their pages do not matter.
        size: the most queries in a tile.
        num_tokens: T.
        block: the first token read by a tile is a multiple of this number of tokens.
        sliding_window: window of each query; tokens before all windows of a tile are not read.
    """
    _, query_start, query_len, context_len = requests
    rows = query_len.shape[0]
    count = jnp.where(query_len > 1, pl.cdiv(query_len, size), 0)
    row, index, _, total = lay_out(count, num_tokens // size + min(rows, num_tokens))
    offset = index * size
    position = (context_len - query_len)[row] + offset
    low = jnp.maximum(position + 1 - (sliding_window or NO_WINDOW), 0)
    number = jnp.minimum(query_len[row] - offset, size)
    fields = [row, query_start[row] + offset, number, position, low - low % block, context_len[row]]
    return Tiles(jnp.stack(fields), total)
