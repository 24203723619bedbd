"""Ragged attention for GPUs without a kernel for the shapes: gathers in plain XLA, without loops of unknown length.

A GPU asks its host at every turn of a loop whose trip count is known only at run time, as `xla.py` has for each page
of each request. Here all requests move through their contexts together, some pages at a time:

    increments  [R, 1, H, D]     the first rows; one query of each
    tiles       [I, 32, H, D]    of chunks; up to 32 consecutive queries of one request

    for each of 2**b steps:  gather the next pages of every row (or tile)  -> K, V [R, K, D, C]
                             scores [R, K, M, C], masks, online softmax, weighted values

The number of steps is a power of two: the least that covers the longest context of the batch. Each power is a branch
with a constant trip count, so the host is asked once for increments and once for chunks in each layer. Branch 0 does
nothing. The work is that of the longest context, for every row.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages, RowArrays, num_kv_heads, read_page
from orca_jax.kernels.ragged_attention.api import MASKED, Scores
from orca_jax.kernels.ragged_attention.gpu_plan import cut_queries
from orca_jax.values.cache_spec import ceil_div

_TILE_QUERIES = 32
_STEP_TOKENS = 128


class _Rows(NamedTuple):
    """Rows of B queries each; a row without a request has context 0."""

    queries: Float[Array, "I B K G D"]  # scaled
    page_lists: Int[Array, "I P"]
    positions: Int[Array, "I B"]  # of the queries
    contexts: Int[Array, " I"]


class _GatherSoftmax(NamedTuple):
    """Online softmax of all queries: running maximum, denominator and weighted values."""

    top: Float[Array, "I K M"]
    denominator: Float[Array, "I K M"]
    values: Float[Array, "I K M D"]


def attend(
    q: Float[Array, "T H D"], pages: KVPages, requests: RowArrays, scores: Scores
) -> Float[Array, "T H D"]:
    """`ragged_attention` for any layout, heads, head dim, page size and type; scores and sums in float32."""
    page_table, _, query_len, context_len = requests
    num_tokens, num_heads, head_dim = q.shape
    grouped = (q.astype(jnp.float32) * scores.scale).reshape(
        num_tokens, num_kv_heads(pages, head_dim), -1, head_dim
    )
    attend_rows = partial(_attend_rows, pages, scores)
    # increments are the first rows, and their queries the first tokens
    rows = min(num_tokens, page_table.shape[0])
    contexts = jnp.where(query_len == 1, context_len, 0)[:rows]
    increments = attend_rows(
        _Rows(grouped[:rows, None], page_table[:rows], contexts[:, None] - 1, contexts)
    )
    out = jnp.pad(increments[:, 0], ((0, num_tokens - rows), (0, 0), (0, 0)))
    if num_tokens > 1:
        size = min(_TILE_QUERIES, num_tokens)
        tiles = cut_queries(
            requests, size=size, num_tokens=num_tokens, block=1, sliding_window=None
        )
        row, start, number, position, _, context = tiles.fields
        offset = jnp.arange(size, dtype=jnp.int32)
        exists = jnp.arange(row.shape[0]) < tiles.total
        token = jnp.minimum(start[:, None] + offset, num_tokens - 1)
        # tokens that some query sees
        used = jnp.where(exists, jnp.minimum(position + number, context), 0)
        chunks = attend_rows(
            _Rows(grouped[token], page_table[row], position[:, None] + offset, used)
        )
        is_own = exists[:, None] & (offset < number[:, None])
        out = out.at[jnp.where(is_own, token, num_tokens)].set(chunks, mode="drop")
    is_used = jnp.arange(num_tokens)[:, None, None] < query_len.sum()
    return jnp.where(is_used, out, 0.0).reshape(num_tokens, num_heads, head_dim).astype(q.dtype)


def _attend_rows(pages: KVPages, scores: Scores, rows: _Rows) -> Float[Array, "I B H D"]:
    """Attention of all rows, in as many steps as the longest context needs."""
    count, size, kv_heads, groups, head_dim = rows.queries.shape
    step_pages = max(1, _STEP_TOKENS // pages.page_size)
    most_steps = ceil_div(rows.page_lists.shape[1], step_pages)
    if scores.window is not None:
        rows = _from_window(rows, scores.window, pages.page_size)
    page_lists = jnp.pad(rows.page_lists, ((0, 0), (0, -rows.page_lists.shape[1] % step_pages)))
    visit = partial(_visit, pages, scores, rows, page_lists, step_pages)
    shape = count, kv_heads, groups * size
    top, denominator = (
        jnp.broadcast_to(each, shape) for each in scores.before_tokens(kv_heads, groups, size)
    )
    empty = _GatherSoftmax(top, denominator, jnp.zeros((*shape, head_dim)))

    def branch(steps: int) -> Callable[[], _GatherSoftmax]:
        return lambda: lax.fori_loop(0, steps, visit, empty)

    lengths = [0, *(min(2**b, most_steps) for b in range((most_steps - 1).bit_length() + 1))]
    needed = -(-rows.contexts.max() // (step_pages * pages.page_size))
    done = lax.switch(
        jnp.searchsorted(jnp.array(lengths), needed), [branch(steps) for steps in lengths]
    )
    out = done.values / jnp.maximum(done.denominator, 1e-30)[..., None]
    by_query = out.reshape(count, kv_heads, groups, size, head_dim).transpose(0, 3, 1, 2, 4)
    return by_query.reshape(count, size, kv_heads * groups, head_dim)


def _from_window(rows: _Rows, window: int | Int[Array, ""], page_size: int) -> _Rows:
    """The same rows without the pages before the window of their first query."""
    begin = jnp.maximum(rows.positions[:, 0] + 1 - window, 0) // page_size
    page = jnp.minimum(
        begin[:, None] + jnp.arange(rows.page_lists.shape[1]), rows.page_lists.shape[1] - 1
    )
    lists = jnp.take_along_axis(rows.page_lists, page, axis=1)
    left_out = begin * page_size
    return rows._replace(
        page_lists=lists,
        positions=rows.positions - left_out[:, None],
        contexts=rows.contexts - left_out,
    )


def _visit(
    pages: KVPages,
    scores: Scores,
    rows: _Rows,
    page_lists: Int[Array, "I P"],
    step_pages: int,
    step: jax.Array,
    state: _GatherSoftmax,
) -> _GatherSoftmax:
    """Attend to the next pages of every row."""
    count, size, kv_heads, groups, head_dim = rows.queries.shape
    number = lax.dynamic_slice_in_dim(page_lists, step * step_pages, step_pages, axis=1)  # [I, c]
    read = jax.vmap(jax.vmap(lambda page: read_page(pages, page, head_dim)))
    # [I, c, K, D, S] to [I, K, D, c S]
    k, v = (x.transpose(0, 2, 3, 1, 4).reshape(count, kv_heads, head_dim, -1) for x in read(number))
    token = step * step_pages * pages.page_size + jnp.arange(k.shape[-1], dtype=jnp.int32)
    is_seen = token < rows.contexts[:, None]  # [I, C]
    if scores.window is not None:
        is_seen &= token > rows.positions[:, :1] - scores.window
    heads = rows.queries.transpose(0, 2, 3, 1, 4).reshape(count, kv_heads, groups * size, head_dim)
    products = jnp.einsum("ikmd,ikdc->ikmc", heads, k, preferred_element_type=jnp.float32)
    position = jnp.tile(rows.positions, (1, groups))[..., None]  # [I, M, 1]
    visible = is_seen[:, None] & (token <= position)
    if scores.window is not None:
        visible &= token > position - scores.window
    visible = visible[:, None]
    products = jnp.where(visible, scores.capped(products), MASKED)
    top = jnp.maximum(state.top, products.max(-1))
    weights = jnp.where(visible, jnp.exp(products - top[..., None]), 0.0)
    shrink = jnp.exp(state.top - top)
    v = jnp.where(is_seen[:, None, None], v, 0.0)  # other slots may hold NaN
    weighted = jnp.einsum("ikmc,ikdc->ikmd", weights, v, preferred_element_type=jnp.float32)
    denominator = state.denominator * shrink + weights.sum(-1)
    return _GatherSoftmax(top, denominator, state.values * shrink[..., None] + weighted)


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> None:
    """Return None: this backend can do all shapes."""
