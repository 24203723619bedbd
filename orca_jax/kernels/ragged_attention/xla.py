"""Ragged attention in plain XLA: loops with trip counts known at run time.

    for each request with one query              (increments, which come first; see `attend_increment`)
        for each page of its context: scores [H, S], online softmax, weighted values
    for each request with several queries        (chunks of prompts, and tokens to verify)
        for each block of up to 128 queries, and for each block of 16 of a short rest
            for each page visible to this block: the same with [H, block, S]

The amount of work follows the real lengths. No shape depends on a context length: there is one program for each T. A
loop body runs on one core, so on a CPU the caller shards the heads over one JAX device per core.

A block of queries may reach past its request. Its surplus output falls into padding, or the next request overwrites
it, because requests come in the order of `query_start`.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from orca_jax.helpers.processor import multiplies_bfloat16
from orca_jax.kernels.kv_pages import HeadMajorPages, KVPages, RowArrays, num_kv_heads, read_page
from orca_jax.kernels.ragged_attention.api import MASKED, Scores

_MAX_QUERY_BLOCK = 128
_SHORT_BLOCK = 16
_MOST_SHORT = 2  # short blocks after the long ones; more of them take longer than one long block
_CHANNELS = 8  # of keys in a sum of `attend_increment`
_LANES = 16  # its sums of values for each channel
# From here on matrix products are as fast (lab/measured/attention.py):
_MOST_CHANNELS = 512  # of all query heads of a KV head,
_MOST_HEADS = 3  # and query heads of a single KV head


class _SoftmaxState(NamedTuple):
    """Online softmax of M query heads by K: running maximum, denominator and weighted values."""

    top: Float[Array, "K M"]
    denominator: Float[Array, "K M"]
    values: Float[Array, "K M D"]


class _LaneSums(NamedTuple):
    """Online softmax of the M query heads of each of K KV heads: maximum, denominator and parts of the values."""

    top: Float[Array, "K M"]
    denominator: Float[Array, "K M"]
    values: Float[Array, "K M D 16"]


def attend(
    q: Float[Array, "T H D"], pages: KVPages, requests: RowArrays, scores: Scores
) -> Float[Array, "T H D"]:
    """`ragged_attention` for any layout, heads, head dim, page size and type; scores and sums in float32."""
    page_table, query_start, query_len, context_len = requests
    queries = grouped_queries(q, pages, scores.scale)
    attend_block = attention_of_blocks(queries, pages, requests, scores)

    def increment(row: jax.Array, out: jax.Array) -> jax.Array:
        if has_form(pages, queries.shape[2], queries.shape[3]):
            query = lax.dynamic_index_in_dim(queries, query_start[row], keepdims=False).astype(
                jnp.float32
            )
            result = attend_increment(query, pages, page_table[row], context_len[row], scores)
            return lax.dynamic_update_index_in_dim(out, result, query_start[row], axis=0)
        return attend_block(row, jnp.zeros_like(row), 1, out)

    out = lax.fori_loop(
        0, jnp.sum(query_len == 1), increment, jnp.zeros(queries.shape, jnp.float32)
    )
    return with_chunks(q, requests, attend_block, out)


def grouped_queries(
    q: Float[Array, "T H D"], pages: KVPages, scale: float
) -> Float[Array, "B K G D"]:
    """The scaled queries of each KV head, in the type of products, with padding: a block may start at the last one."""
    num_tokens, _, head_dim = q.shape
    scaled = (q.astype(jnp.float32) * scale).astype(_product_type(pages))
    grouped = scaled.reshape(num_tokens, num_kv_heads(pages, head_dim), -1, head_dim)
    return jnp.pad(grouped, ((0, _largest_block(num_tokens) - 1), (0, 0), (0, 0), (0, 0)))


type AttendBlock = Callable[[jax.Array, jax.Array, int, jax.Array], jax.Array]
"""`(row, offset, size, out) -> out`: computes queries `offset : offset + size` of request `row`, and writes them."""


def attention_of_blocks(
    queries: Float[Array, "B K G D"], pages: KVPages, requests: RowArrays, scores: Scores
) -> AttendBlock:
    """The attention of some queries of one request, from `grouped_queries` and the arguments of `ragged_attention`."""

    page_table, query_start, query_len, context_len = requests

    def attend(row: jax.Array, offset: jax.Array, size: int, out: jax.Array) -> jax.Array:
        start = query_start[row] + offset
        block = lax.dynamic_slice_in_dim(queries, start, size)  # [size, K, G, D]
        first = context_len[row] - query_len[row] + offset  # position of the first query
        result = _attend_block(block, pages, page_table[row], first, context_len[row], scores)
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    return attend


def with_chunks(
    q: Float[Array, "T H D"],
    requests: RowArrays,
    attend: AttendBlock,
    increments: Float[Array, "B K G D"],
) -> Float[Array, "T H D"]:
    """The attention of all requests.

    Args:
        q: its shape and type are those of the result.
        requests: the requests.
        attend: the function of `attention_of_blocks`.
        increments: the attention of the requests with one query. All other values are finite.
    """
    num_tokens = q.shape[0]
    query_len = requests.query_len
    block = _largest_block(num_tokens)
    # queries after the long blocks
    most_rest = _MOST_SHORT * _SHORT_BLOCK if _has_long(num_tokens) else 0

    def blocks(
        row: jax.Array, begun: jax.Array, count: jax.Array, size: int, out: jax.Array
    ) -> jax.Array:
        """Compute `count` blocks of `size` queries of request `row`, from its query `begun` on."""
        return lax.fori_loop(0, count, lambda i, out: attend(row, begun + i * size, size, out), out)

    def chunk(row: jax.Array, out: jax.Array) -> jax.Array:
        num_long = _ceil_div(jnp.maximum(query_len[row] - most_rest, 0), block)
        out = blocks(row, jnp.zeros_like(row), num_long, block, out)
        if not _has_long(num_tokens):
            return out
        begun = num_long * block
        return blocks(
            row, begun, _ceil_div(query_len[row] - begun, _SHORT_BLOCK), _SHORT_BLOCK, out
        )

    out = increments
    if num_tokens > 1:
        out = lax.fori_loop(jnp.sum(query_len == 1), jnp.sum(query_len > 0), chunk, out)
    return out[:num_tokens].reshape(q.shape).astype(q.dtype)


def _has_long(num_tokens: int) -> bool:
    """True if there are long blocks; else short ones do all, and one loop less is compiled."""
    return num_tokens > _MOST_SHORT * _SHORT_BLOCK


def _largest_block(num_tokens: int) -> int:
    return min(_MAX_QUERY_BLOCK if _has_long(num_tokens) else _SHORT_BLOCK, num_tokens)


def _attend_block(
    q: Float[Array, "B K G D"],
    pages: KVPages,
    page_list: Int[Array, " P"],
    first: Int[Array, ""],
    context_len: Int[Array, ""],
    scores: Scores,
) -> Float[Array, "B K G D"]:
    """Attention of B consecutive queries of one request, the first at position `first`."""
    size, kv_heads, groups, head_dim = q.shape
    page_size = pages.page_size
    window = scores.window
    heads = q.transpose(1, 2, 0, 3).reshape(kv_heads, groups * size, head_dim)  # [K, M, D]
    position = first + jnp.tile(jnp.arange(size), groups)  # [M]
    # No query sees past its own position. Queries past the request's end see up to its last token.
    num_visible = jnp.minimum(first + size, context_len)

    def visit(index: jax.Array, state: _SoftmaxState) -> _SoftmaxState:
        k, v = read_page(pages, page_list[index], head_dim, heads.dtype)
        token = index * page_size + jnp.arange(page_size)
        products = jnp.einsum("kmd,kds->kms", heads, k, preferred_element_type=jnp.float32)
        visible = token <= jnp.minimum(position, num_visible - 1)[:, None]
        if window is not None:
            visible &= token > position[:, None] - window
        products = jnp.where(visible, scores.capped(products), MASKED)
        top = jnp.maximum(state.top, products.max(-1))
        weights = jnp.exp(products - top[..., None])
        shrink = jnp.exp(state.top - top)
        is_seen = token < num_visible
        if window is not None:
            is_seen &= token > first - window
        v = jnp.where(is_seen, v, jnp.zeros_like(v))  # other slots may hold NaN
        weighted = jnp.einsum(
            "kms,kds->kmd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return _SoftmaxState(
            top,
            state.denominator * shrink + weights.sum(-1),
            state.values * shrink[..., None] + weighted,
        )

    empty = _SoftmaxState(
        *scores.before_tokens(kv_heads, groups, size), jnp.zeros(heads.shape, jnp.float32)
    )
    first_page = 0 if window is None else jnp.maximum(first + 1 - window, 0) // page_size
    done = lax.fori_loop(first_page, _ceil_div(num_visible, page_size), visit, empty)
    out = (done.values / done.denominator[..., None]).reshape(kv_heads, groups, size, head_dim)
    return out.transpose(2, 0, 1, 3)


def has_form(pages: KVPages, heads: int, head_dim: int) -> TypeGuard[HeadMajorPages]:
    """True if `attend_increment` can do these pages and is faster than matrix products, for `heads` of each KV head."""
    return (
        isinstance(pages, HeadMajorPages)
        and pages.v is not None
        and not pages.is_quantised
        and head_dim % _CHANNELS == 0
        and pages.page_size % _LANES == 0
        and heads * head_dim <= _MOST_CHANNELS
        and (pages.k.shape[1] > 1 or heads <= _MOST_HEADS)
    )


def attend_increment(
    q: Float[Array, "K M D"],
    pages: HeadMajorPages,
    page_list: Int[Array, " P"],
    context_len: Int[Array, ""],
    scores: Scores,
) -> Float[Array, "K M D"]:
    """Attention of the last token of a request over its context, at the speed of the memory.

    XLA:CPU computes the product of one query and a page in several passes: it copies the page out of the cache,
    converts it to float32, and multiplies. Here products and sums are written element by element, so that XLA fuses
    them with the read. The order of the sums lets each page be read once, from its begin to its end:

        keys     a sum over each group of 8 consecutive channels, then the sum of the groups
        values   16 sums for each channel, of every 16th token; they are added up after the last page

    Args:
        q: scaled queries in float32.
        pages: cache of all requests.
        page_list: pages of the request, in order.
        context_len: tokens of the request, this one included.
        scores: window, cap and sinks; the factor is in `q`.
    """
    kv_heads, heads, head_dim = q.shape
    v_pages = pages.v
    page_size = pages.page_size
    window = scores.window
    assert v_pages is not None, "see `has_form`"
    first = jnp.int32(0) if window is None else jnp.maximum(context_len - window, 0)

    def visit(index: jax.Array, state: _LaneSums, *, is_whole: bool) -> _LaneSums:
        token = index * page_size + jnp.arange(page_size)
        is_visible = (token >= first) & (token < context_len)
        products = scores.capped(_products(q, pages.k, page_list[index]))
        if not is_whole:
            products = jnp.where(is_visible, products, MASKED)
        top = jnp.maximum(state.top, products.max(-1))
        weights = jnp.exp(products - top[..., None])
        shrink = jnp.exp(state.top - top)
        values = state.values * shrink[..., None, None]
        for start in range(0, page_size, _LANES):
            part = _slice(v_pages, page_list[index], 2, start, _LANES)[:, None]
            if not is_whole:  # other slots may hold NaN
                part = jnp.where(is_visible[start : start + _LANES], part, 0)
            values = values + weights[:, :, None, start : start + _LANES] * part
        return _LaneSums(top, state.denominator * shrink + weights.sum(-1), values)

    empty = jnp.zeros((kv_heads, heads, head_dim, _LANES))
    state = _LaneSums(*scores.before_tokens(kv_heads, heads, 1), empty)
    begin = first // page_size
    end = _ceil_div(context_len, page_size)
    partial = begin
    if window is None:
        partial = context_len // page_size
        state = lax.fori_loop(
            begin, partial, lambda index, state: visit(index, state, is_whole=True), state
        )
    state = lax.fori_loop(
        partial, end, lambda index, state: visit(index, state, is_whole=False), state
    )
    return state.values.sum(-1) / state.denominator[..., None]


def _products(
    q: Float[Array, "K M D"], keys: Float[Array, "N K D S"], page: Int[Array, ""]
) -> Float[Array, "K M S"]:
    """Inner products of the queries and the keys of one page."""
    kv_heads, heads, head_dim = q.shape
    groups = head_dim // _CHANNELS
    grouped = keys.reshape(keys.shape[0], kv_heads, groups, _CHANNELS, keys.shape[3])
    queries = q.reshape(kv_heads, heads, groups, _CHANNELS, 1)
    sums = jnp.zeros(())
    for channel in range(_CHANNELS):
        sums = (
            sums + queries[:, :, :, channel] * _slice(grouped, page, 2, channel, 1)[:, None, :, 0]
        )
    # Fused with the next sum, the loop over groups would be the inner one, and jump about the page.
    parts = lax.optimization_barrier(sums)
    scores = parts[:, :, 0]
    for group in range(1, groups):
        scores = scores + parts[:, :, group]
    return scores


def _slice(
    pool: Array, page: Int[Array, ""], axis: int, start: int, size: int
) -> Float[Array, "..."]:
    """Part of one page along an axis of the page, in float32."""
    starts = [jnp.zeros_like(page)] * pool.ndim
    sizes = list(pool.shape)
    starts[0] = page
    sizes[0] = 1
    starts[axis + 1] = jnp.asarray(start, page.dtype)
    sizes[axis + 1] = size
    return lax.dynamic_slice(pool, starts, sizes, allow_negative_indices=False)[0].astype(
        jnp.float32
    )


def _product_type(pages: KVPages) -> DTypeLike:
    """The type of the products' operands: bfloat16 for these pages, if the processor multiplies it; else float32."""
    is_narrow = pages.dtype == jnp.bfloat16 and multiplies_bfloat16()
    return jnp.bfloat16 if is_narrow else jnp.float32


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    """a / b rounded up."""
    return (a + b - 1) // b


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> None:
    """Return None: this backend can do all shapes."""
