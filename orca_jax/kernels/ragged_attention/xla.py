"""Ragged attention in plain XLA: loops with trip counts known at run time.

    for each request with one query              (increments, which come first)
        for each page of its context: scores [H, S], online softmax, weighted values
    for each request with several queries        (chunks of prompts, and tokens to verify)
        for each block of up to 128 queries, and for each block of 16 of a short rest
            for each page visible to this block: the same with [H, block, S]

The amount of work follows the real lengths. No shape depends on a context length: there is one program for each T. A
loop body runs on one core, so on a CPU the caller shards the heads over one JAX device per core.

A block of queries may reach past its request. Its surplus output falls into padding, or the next request overwrites
it, because requests come in the order of `query_start`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from orca_jax.kernels.kv_pages import KVPages, num_kv_heads, read_page
from orca_jax.processor import multiplies_bfloat16

_MAX_QUERY_BLOCK = 128
_SHORT_BLOCK = 16
_MOST_SHORT = 2  # short blocks after the long ones; more of them take longer than one long block
_MASKED = -1e30  # finite: a fully masked block must not make NaN out of inf - inf


class _SoftmaxState(NamedTuple):
    """Online softmax of M query heads by K: running maximum, denominator and weighted values."""

    top: Float[Array, "K M"]
    denominator: Float[Array, "K M"]
    values: Float[Array, "K M D"]


def ragged_attention_xla(
    q: Float[Array, "T H D"],
    pages: KVPages,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    scale: float,
    sliding_window: int | Int[Array, ""] | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "T H D"]:
    """`ragged_attention` for any layout, heads, head dim, page size and type; scores and sums in float32."""
    num_tokens, _, head_dim = q.shape
    block = min(_MAX_QUERY_BLOCK, num_tokens)
    num_increments = jnp.sum(query_len == 1)
    num_requests = jnp.sum(query_len > 0)

    # A block may start at the last query and reach `block - 1` further.
    scaled = (q.astype(jnp.float32) * scale).astype(_product_type(pages))
    grouped = scaled.reshape(num_tokens, num_kv_heads(pages, head_dim), -1, head_dim)
    grouped = jnp.pad(grouped, ((0, block - 1), (0, 0), (0, 0), (0, 0)))

    def attend(row: jax.Array, offset: jax.Array, size: int, out: jax.Array) -> jax.Array:
        """Compute queries `offset : offset + size` of request `row`, and write them to `out`."""
        start = query_start[row] + offset
        queries = lax.dynamic_slice_in_dim(grouped, start, size)  # [size, K, G, D]
        first = context_len[row] - query_len[row] + offset  # position of the first query
        result = _attend_block(queries, pages, page_table[row], first, context_len[row], sliding_window, soft_cap)
        return lax.dynamic_update_slice_in_dim(out, result, start, axis=0)

    def increment(row: jax.Array, out: jax.Array) -> jax.Array:
        return attend(row, jnp.zeros_like(row), 1, out)

    def chunk(row: jax.Array, out: jax.Array) -> jax.Array:
        length, short = query_len[row], min(_SHORT_BLOCK, block)
        rest = _MOST_SHORT * short if short < block else 0  # at most so many queries are left to short blocks
        num_long = _ceil_div(jnp.maximum(length - rest, 0), block)
        out = lax.fori_loop(0, num_long, lambda i, out: attend(row, i * block, block, out), out)
        if short == block:
            return out
        begun = num_long * block
        num_short = _ceil_div(jnp.maximum(length - begun, 0), short)
        return lax.fori_loop(0, num_short, lambda i, out: attend(row, begun + i * short, short, out), out)

    out = jnp.zeros(grouped.shape, jnp.float32)
    out = lax.fori_loop(0, num_increments, increment, out)
    if num_tokens > 1:
        out = lax.fori_loop(num_increments, num_requests, chunk, out)
    return out[:num_tokens].reshape(q.shape).astype(q.dtype)


def _attend_block(
    q: Float[Array, "B K G D"],
    pages: KVPages,
    page_list: Int[Array, " P"],
    first: Int[Array, ""],
    context_len: Int[Array, ""],
    sliding_window: int | Int[Array, ""] | None,
    soft_cap: float | None,
) -> Float[Array, "B K G D"]:
    """Attention of B consecutive queries of one request, the first at position `first`."""
    size, kv_heads, groups, head_dim = q.shape
    page_size = pages.page_size
    heads = q.transpose(1, 2, 0, 3).reshape(kv_heads, groups * size, head_dim)  # [K, M, D]
    position = first + jnp.tile(jnp.arange(size), groups)  # [M]
    # No query sees past its own position. Queries past the request's end see up to its last token.
    num_visible = jnp.minimum(first + size, context_len)

    def visit(index: jax.Array, state: _SoftmaxState) -> _SoftmaxState:
        k, v = read_page(pages, page_list[index], head_dim, heads.dtype)
        token = index * page_size + jnp.arange(page_size)
        scores = jnp.einsum("kmd,kds->kms", heads, k, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        visible = token <= jnp.minimum(position, num_visible - 1)[:, None]
        if sliding_window is not None:
            visible &= token > position[:, None] - sliding_window
        scores = jnp.where(visible, scores, _MASKED)
        top = jnp.maximum(state.top, scores.max(-1))
        weights = jnp.exp(scores - top[..., None])
        shrink = jnp.exp(state.top - top)
        v = jnp.where(token < num_visible, v, jnp.zeros_like(v))  # unwritten slots may hold NaN
        weighted = jnp.einsum("kms,kds->kmd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return _SoftmaxState(
            top, state.denominator * shrink + weights.sum(-1), state.values * shrink[..., None] + weighted
        )

    shape = heads.shape[:2]
    empty = _SoftmaxState(jnp.full(shape, _MASKED), jnp.zeros(shape), jnp.zeros(heads.shape, jnp.float32))
    first_page = 0 if sliding_window is None else jnp.maximum(first + 1 - sliding_window, 0) // page_size
    done = lax.fori_loop(first_page, _ceil_div(num_visible, page_size), visit, empty)
    out = (done.values / done.denominator[..., None]).reshape(kv_heads, groups, size, head_dim)
    return out.transpose(2, 0, 1, 3)


def _product_type(pages: KVPages) -> DTypeLike:
    """The type of the products' operands: bfloat16 for such pages, if the processor multiplies it; else float32."""
    is_narrow = pages.dtype == jnp.bfloat16 and multiplies_bfloat16()
    return jnp.bfloat16 if is_narrow else jnp.float32


def _ceil_div(a: jax.Array, b: int) -> jax.Array:
    """a / b rounded up."""
    return (a + b - 1) // b


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> None:
    """Return None: this backend can do all shapes."""


attend = ragged_attention_xla
"""The name that the table of backends expects."""
