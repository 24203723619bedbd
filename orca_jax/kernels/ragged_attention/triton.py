"""Ragged paged attention for CUDA cards before and after Hopper, through Pallas' Triton backend.

JAX has deprecated that backend, so all code for it is in this file. It stays as long as Ampere and Ada have no other
kernels. On Hopper it runs the shapes refused by `hopper/`: float32, 8-bit pages, head dim 256.

A page is token major (`kernels/kv_pages.py`). Triton reads through one pointer per element, so a block of tokens may
lie on many pages or on a part of one. One program serves all page sizes:

                            block of C tokens of one request and one KV head
    page_table[row] ->  [page, slot, head * 2D : + D] is K, and [.. + D : + D] is V
    page 17             slot 14 | K D | V D |
                        slot 15 | K D | V D |           scores  [M, C] = q [M, D] . K^T
    page 3              slot 0  | K D | V D |           values  [M, D] = weights [M, C] . V
                        slot 1  | K D | V D |           M = queries * G, at least 16 for tensor cores

    Triton has only powers of two. D = 80 is 64 + 16, D = 112 is 64 + 32 + 16: one product for each part, no padding.

One call is three kernels, because increments are bound by memory and chunks by arithmetic:

1. `_increments`, grid (KV head, piece). A program computes one piece of a context for the G query heads of one KV head.
   `gpu_plan.py` cuts the pieces: even a few rows with long contexts fill the card. The program loops over blocks of
   tokens; the compiler prefetches `num_stages` of them. Neighbouring programs are heads of the same pages.
2. `_combine`, grid (KV head, row). It weights the pieces of one row by their log-sum-exp and adds them up.
3. `_chunks`, grid (KV head, tile). A program computes up to M / G consecutive queries of one request, for all G query
   heads of one KV head: even a short chunk fills a tile. Tiles with the longest contexts come first. Blocks visible
   to every query go through a loop without masks, the others through a second loop with masks.

Tokens before the window of the first query are never read. Nor are those past a context: the last token is read in
their place, and its score is masked. So memory that no query may see needs no special care. Rows of a tile past its
queries write to one row, and that row is discarded.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int, Num

from orca_jax.kernels.kv_pages import KVPages, RowArrays, TokenMajorPages, num_kv_heads
from orca_jax.kernels.ragged_attention.api import Scores
from orca_jax.kernels.ragged_attention.gpu_plan import (
    ITEMS,
    ContextPieces,
    Tiles,
    cut_contexts,
    cut_queries,
    multiprocessors_here,
    refuse_traced,
)

_MASKED = -1e30  # finite: a fully masked block must not make NaN out of inf - inf
_LOG2E = math.log2(math.e)
LEAST_ROWS = 16  # rows of a product on tensor cores
HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
PAGE_DTYPES = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")

Ref = Any  # Pallas has no public type for references


@dataclass(frozen=True)
class TritonShape:
    """Static parameters shared by the kernels of one call.

    Attributes:
        head_dim, num_kv_heads, page_size: D, K and S.
        groups: G, query heads that share one KV head.
        rows: M, rows of a product.
        block: C, tokens read and multiplied together.
        warps: warps of a program.
        stages: blocks that the compiler prefetches.
        dtype: type of factors; sums are float32.
        is_fp8: true if pages are float8_e4m3fn, read as bytes.
        scores: factor, window and cap, without sinks.
        interpret: true to interpret the kernels instead of compiling them.
        has_values: false for latents (`triton_latents.py`), of which each part of the query heads has a program.
        widest: the largest part of D that is multiplied at once.
    """

    head_dim: int
    num_kv_heads: int
    groups: int
    page_size: int
    rows: int
    block: int
    warps: int
    stages: int
    dtype: Any
    is_fp8: bool
    scores: Scores
    interpret: bool
    has_values: bool = True
    widest: int = 256  # part of D

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Start and size of each part of D: powers of two, the largest first."""
        rest = self.head_dim
        parts = []
        while rest:
            size = min(1 << (rest.bit_length() - 1), self.widest)
            parts.append((self.head_dim - rest, size))
            rest -= size
        return parts


class _Cache(NamedTuple):
    """References to the arrays that are read in blocks."""

    kv: Ref  # [N, S, W]
    scale: Ref | None  # [N, 1, 2K]
    table: Ref  # [R, P]


class _Sight(NamedTuple):
    """The tokens read by a program, and the tokens visible to each of its rows."""

    row: Int[Array, ""]
    head: Int[Array, ""]  # KV head
    first: Int[Array, ""]  # first token that is read
    end: Int[Array, ""]  # end of the tokens that are read, exclusive
    low: Int[Array, " M"]  # first token visible to a row
    last: Int[Array, " M"]  # last token visible to a row
    # without a window, every row sees all tokens from `first` up to this one, exclusive
    known: Int[Array, ""]
    begin: Int[
        Array, ""
    ]  # first token that some row sees; `first`, unless blocks must lie within pages


class _TritonSoftmax(NamedTuple):
    """Online softmax of M rows: running maximum (of scores in bits), denominator, and weighted values by parts of D."""

    top: Float[Array, " M"]
    denominator: Float[Array, " M"]
    values: tuple[Float[Array, "M part"], ...]


def _empty(shape: TritonShape, rows: int) -> _TritonSoftmax:
    values = tuple(jnp.zeros((rows, size), jnp.float32) for _, size in shape.parts)
    return _TritonSoftmax(
        jnp.full(rows, _MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), values
    )


def _attend(
    shape: TritonShape, q: tuple[jax.Array, ...], cache: _Cache, sight: _Sight
) -> _TritonSoftmax:
    """Attend over all blocks of a program, first over those without masks."""

    visit_block = _visit if shape.has_values else _visit_latents

    def visit(i: jax.Array, state: _TritonSoftmax, *, is_masked: bool) -> _TritonSoftmax:
        return visit_block(shape, q, cache, sight, i, state, is_masked=is_masked)

    count = lax.div(sight.end - sight.first + (shape.block - 1), jnp.int32(shape.block))
    clear = jnp.int32(0)
    if shape.scores.sliding_window is None:
        clear = lax.div(jnp.minimum(sight.known, sight.end) - sight.first, jnp.int32(shape.block))
    state = lax.fori_loop(
        jnp.int32(0), clear, partial(visit, is_masked=False), _empty(shape, shape.rows)
    )
    return lax.fori_loop(clear, count, partial(visit, is_masked=True), state)


def _visit(
    shape: TritonShape,
    q: tuple[jax.Array, ...],
    cache: _Cache,
    sight: _Sight,
    i: Int[Array, ""],
    state: _TritonSoftmax,
    *,
    is_masked: bool,
) -> _TritonSoftmax:
    """Attend over one block of tokens."""
    token = sight.first + i * shape.block + jnp.arange(shape.block, dtype=jnp.int32)
    seen = jnp.minimum(token, sight.end - 1) if is_masked else token
    page = cache.table[sight.row, lax.div(seen, jnp.int32(shape.page_size))]
    slot = lax.rem(seen, jnp.int32(shape.page_size))

    def read(part: int, begin: int, size: int) -> jax.Array:
        column = (2 * sight.head + part) * shape.head_dim + begin
        return _widen(shape, cache.kv[page, slot, pl.ds(column, size)])

    scores = reduce(
        jnp.add, (_product(x, read(0, *part).T) for x, part in zip(q, shape.parts, strict=True))
    )
    scales = None
    if cache.scale is not None:
        scores = scores * cache.scale[page, 0, 2 * sight.head][None, :]
        scales = cache.scale[page, 0, 2 * sight.head + 1]
    values = (partial(read, 1, *part) for part in shape.parts)
    mask = token if is_masked else None
    return _added(shape, sight, state, scores, values, mask, scales)


def _visit_latents(
    shape: TritonShape,
    q: tuple[jax.Array, ...],
    cache: _Cache,
    sight: _Sight,
    i: Int[Array, ""],
    state: _TritonSoftmax,
    *,
    is_masked: bool,
) -> _TritonSoftmax:
    """Attend over one block of latents `[D, C]`, which lies within a page, so that its reads are vectors of tokens."""
    number = lax.div(sight.first, jnp.int32(shape.block)) + i
    token = number * shape.block + jnp.arange(shape.block, dtype=jnp.int32)
    blocks = jnp.int32(shape.page_size // shape.block)
    page = cache.table[sight.row, lax.div(number, blocks)]
    slots = pl.ds(lax.rem(number, blocks) * shape.block, shape.block)
    is_seen = (token >= sight.begin) & (token < sight.end)

    def kept(values: jax.Array) -> jax.Array:
        """The values, with zeros for tokens that no row sees: other slots may hold NaN."""
        return jnp.where(is_seen, values, jnp.zeros_like(values)) if is_masked else values

    def read(begin: int, size: int) -> jax.Array:
        channels = pl.ds(page * shape.head_dim + begin, size)
        return kept(_widen(shape, cache.kv[channels, slots]))

    parts = [read(*part) for part in shape.parts]
    scores = reduce(jnp.add, (_product(x, part) for x, part in zip(q, parts, strict=True)))
    scales = None
    if cache.scale is not None:
        scales = kept(cache.scale[page, 0, slots])
        scores = scores * scales[None, :]
    values = (lambda part=part: part.T for part in parts)
    return _added(shape, sight, state, scores, values, token if is_masked else None, scales)


def _added(
    shape: TritonShape,
    sight: _Sight,
    state: _TritonSoftmax,
    scores: Float[Array, "M C"],
    values: Iterable[Callable[[], Num[Array, "C part"]]],
    token: Int[Array, " C"] | None,
    scales: Float[Array, " C"] | None,
) -> _TritonSoftmax:
    """The softmax with the tokens of a block.

    Args:
        shape: the parameters.
        sight: the tokens visible to each row.
        state: the softmax of the blocks before.
        scores: products of queries and keys.
        values: reads of the parts of the values.
        token: the tokens, to mask those that a row does not see; None if all rows see all of them.
        scales: scales of the values; None if they have none.
    """
    scores = _in_bits(shape, scores)
    if token is not None:
        visible = token[None, :] <= sight.last[:, None]
        if shape.scores.sliding_window is not None:
            visible &= token[None, :] >= sight.low[:, None]
        scores = jnp.where(visible, scores, _MASKED)
    top = jnp.maximum(state.top, scores.max(axis=1))
    weights = jnp.exp2(scores - top[:, None])
    shrink = jnp.exp2(state.top - top)
    denominator = state.denominator * shrink + weights.sum(axis=1)
    if scales is not None:
        weights = weights * scales[None, :]
    weights = weights.astype(shape.dtype)
    sums = tuple(
        old * shrink[:, None] + _product(weights, read())
        for old, read in zip(state.values, values, strict=True)
    )
    return _TritonSoftmax(top, denominator, sums)


def _product(a: jax.Array, b: jax.Array) -> Float[Array, "M n"]:
    """Multiply with float32 sums. float32 factors keep their precision, and are not rounded to TF32's 10 bits."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def _widen(shape: TritonShape, stored: Num[Array, "C part"]) -> Num[Array, "C part"]:
    """Convert stored values to the type of factors.

    Ampere has no conversion of fp8. Its bits, shifted into a float16, are the value divided by 2**8.
    """
    if shape.is_fp8:
        bits = stored.astype(jnp.int16)  # the sign goes to the upper byte
        bits = (bits & jnp.int16(-(2**15))) | ((bits & jnp.int16(0x7F)) << jnp.int16(7))
        stored = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 256.0
    return stored.astype(shape.dtype)


def _in_bits(shape: TritonShape, scores: Float[Array, "M C"]) -> Float[Array, "M C"]:
    """Scale and cap scores, in base 2, so that weights are `exp2` of them."""
    scale = shape.scores.scale
    cap = shape.scores.soft_cap
    if cap is None:
        return scores * (scale * _LOG2E)
    return jnp.tanh(scores * (scale / cap)) * (cap * _LOG2E)


def _denominator(
    state: _TritonSoftmax, sinks: list[Ref], heads: Int[Array, " M"]
) -> Float[Array, " M"]:
    """The sum of the weights of each row, with that of the sink of its head."""
    return state.denominator + sum(
        (jnp.exp2(sink[heads] * _LOG2E - state.top) for sink in sinks), start=0.0
    )


def _increments(
    shape: TritonShape, q: Float[Array, "T H D"], cache: list[jax.Array], pieces: ContextPieces
) -> tuple[Float[Array, "I K G1 D"], Float[Array, "I K G1"]]:
    """Normalised values and log-sum-exp in bits of each piece. Of the G + 1 rows the last one is discarded."""

    def kernel(q_ref: Ref, fields: Ref, total: Ref, *refs: Ref) -> None:
        head = pl.program_id(0)
        piece = pl.program_id(1)
        *inputs, out, mass = refs

        @pl.when(piece < total[0])
        def _exists() -> None:
            row, first, end, low = (fields[i, piece] for i in range(4))
            begin = first
            if shape.scores.sliding_window is not None:
                begin = jnp.maximum(first, low)
                first = begin if shape.has_values else first
            group = jnp.arange(shape.rows, dtype=jnp.int32)
            mine = head * shape.groups + jnp.minimum(group, shape.groups - 1)
            queries = tuple(
                q_ref[row, mine, pl.ds(*part)].astype(shape.dtype) for part in shape.parts
            )
            lows, lasts = (jnp.full(shape.rows, 1, jnp.int32) * bound for bound in (low, end - 1))
            sight = _Sight(row, head, first, end, lows, lasts, end, begin)
            state = _attend(shape, queries, _cache(inputs), sight)
            place = jnp.minimum(group, shape.groups)
            for part, values in zip(shape.parts, state.values, strict=True):
                out[piece, head, place, pl.ds(*part)] = values / state.denominator[:, None]
            mass[piece, head, place] = state.top + jnp.log2(state.denominator)

    num_pieces = pieces.fields.shape[1]
    rows = (shape.num_kv_heads, shape.groups + 1)
    results = [
        jax.ShapeDtypeStruct((num_pieces, *rows, shape.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_pieces, *rows), jnp.float32),
    ]
    launch = _launch(shape, kernel, "increments", (shape.num_kv_heads, num_pieces), results)
    out, mass = launch(q, pieces.fields, pieces.total, *cache)
    return out, mass


def _cache(inputs: list[Ref]) -> _Cache:
    """Name the references: the page table, the pages, and the scales if there are any."""
    table, kv, *scale = inputs
    return _Cache(kv, scale[0] if scale else None, table)


def _combine(
    shape: TritonShape,
    out: Float[Array, "I K G1 D"],
    mass: Float[Array, "I K G1"],
    pieces: ContextPieces,
    sinks: list[jax.Array],
    dtype: Any,
) -> Float[Array, "R K G1 D"]:
    """Combine the pieces of each row; output rows without pieces are not written."""
    rows = pl.next_power_of_2(shape.groups)

    def kernel(values_ref: Ref, mass_ref: Ref, begin: Ref, count: Ref, *refs: Ref) -> None:
        *sinks, result = refs
        head = pl.program_id(0)
        row = pl.program_id(1)
        place = jnp.minimum(jnp.arange(rows, dtype=jnp.int32), shape.groups)

        def add(i: jax.Array, state: _TritonSoftmax) -> _TritonSoftmax:
            piece = begin[row] + i
            mass = mass_ref[piece, head, place]
            top = jnp.maximum(state.top, mass)
            shrink = jnp.exp2(state.top - top)
            weight = jnp.exp2(mass - top)
            values = tuple(
                old * shrink[:, None]
                + values_ref[piece, head, place, pl.ds(*part)] * weight[:, None]
                for old, part in zip(state.values, shape.parts, strict=True)
            )
            return _TritonSoftmax(top, state.denominator * shrink + weight, values)

        @pl.when(count[row] > 0)
        def _any() -> None:
            state = lax.fori_loop(jnp.int32(0), count[row], add, _empty(shape, rows))
            own = head * shape.groups + jnp.minimum(place, shape.groups - 1)
            denominator = _denominator(state, sinks, own)[:, None]
            for part, values in zip(shape.parts, state.values, strict=True):
                result[row, head, place, pl.ds(*part)] = (values / denominator).astype(dtype)

    num_rows = pieces.begin.shape[0]
    results = [jax.ShapeDtypeStruct((num_rows, *out.shape[1:]), dtype)]
    launch = _launch(shape, kernel, "combine", (shape.num_kv_heads, num_rows), results)
    return launch(out, mass, pieces.begin, pieces.number, *sinks)[0]


def _chunks(
    shape: TritonShape,
    q: Float[Array, "T H D"],
    cache: list[jax.Array],
    tiles: Tiles,
    sinks: list[jax.Array],
) -> Float[Array, "T H D"]:
    """Attention of all tiles; the output of other tokens is not written."""
    num_tokens = q.shape[0]

    def kernel(q_ref: Ref, fields: Ref, total: Ref, *refs: Ref) -> None:
        head = pl.program_id(0)
        tile = total[0] - 1 - pl.program_id(1)
        *inputs, out = refs
        own_sinks = inputs[: len(sinks)]
        inputs = inputs[len(sinks) :]

        @pl.when(tile >= 0)
        def _exists() -> None:
            row, start, number, position, first, _ = (fields[i, tile] for i in range(6))
            index = jnp.arange(shape.rows, dtype=jnp.int32)
            query = lax.div(index, jnp.int32(shape.groups))
            group = lax.rem(index, jnp.int32(shape.groups))
            mine = jnp.minimum(query, number - 1)
            heads = head * shape.groups + group
            queries = tuple(
                q_ref[start + mine, heads, pl.ds(*part)].astype(shape.dtype) for part in shape.parts
            )
            last = position + mine
            low = last + 1 - (shape.scores.sliding_window or 0)
            begin = first
            if (window := shape.scores.sliding_window) is not None:
                begin = jnp.maximum(first, position + 1 - window)
                first = begin if shape.has_values else first
            end = position + number
            sight = _Sight(row, head, first, end, low, last, position + 1, begin)
            state = _attend(shape, queries, _cache(inputs), sight)
            place = jnp.where(query < number, start + query, num_tokens)
            denominator = _denominator(state, own_sinks, heads)[:, None]
            for part, values in zip(shape.parts, state.values, strict=True):
                out[place, heads, pl.ds(*part)] = (values / denominator).astype(out.dtype)

    results = [jax.ShapeDtypeStruct((num_tokens + 1, *q.shape[1:]), q.dtype)]
    grid = shape.num_kv_heads, tiles.fields.shape[1]
    launch = _launch(shape, kernel, "chunks", grid, results)
    return launch(q, tiles.fields, tiles.total, *sinks, *cache)[0][:num_tokens]


def _launch(
    shape: TritonShape,
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, int],
    results: list[jax.ShapeDtypeStruct],
) -> Callable[..., list[jax.Array]]:
    launch: Callable[..., list[jax.Array]] = pl.pallas_call(
        kernel,
        out_shape=results,
        grid=grid,
        compiler_params=pltriton.CompilerParams(num_warps=shape.warps, num_stages=shape.stages),
        interpret=shape.interpret,
        name=name,
    )
    return launch


def attend(
    q: Float[Array, "T H D"],
    pages: KVPages,
    requests: RowArrays,
    scores: Scores,
    *,
    multiprocessors: int | None = None,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """`ragged_attention` on GPUs with tensor cores for bfloat16.

    Args:
        multiprocessors: number of the device's multiprocessors; None asks the device. A wrong number costs only speed.
        interpret: run without a GPU.

    Raises:
        NotImplementedError: `refusal` returns a reason, or the window is traced.
    """
    if (reason := refusal(q, pages)) or not isinstance(pages, TokenMajorPages):
        raise NotImplementedError(reason)
    refuse_traced(scores, "triton")
    shape = _shape_of(q, pages, scores, interpret)
    items = ITEMS * (multiprocessors or multiprocessors_here())
    return attend_shaped(
        q, pages.kv, pages.scale, requests, scores, shape, _for_chunks(shape), items
    )


@partial(jax.jit, static_argnums=(5, 6, 7))
def attend_shaped(
    q: Float[Array, "T H D"],
    kv: Num[Array, "*pool"],
    scale: Float[Array, "N 1 _"] | None,
    requests: RowArrays,
    scores: Scores,
    shape: TritonShape,
    chunk_shape: TritonShape,
    items: int,
) -> Float[Array, "T H D"]:
    """Attend with the parameters of both kinds of rows.

    Args:
        q: queries.
        kv: stored values.
        scale: their scales, if they have any.
        requests: the requests.
        scores: factor, window, cap and sinks.
        shape: the parameters for increments.
        chunk_shape: the parameters for chunks.
        items: pieces of increments for all KV heads together, beside one for each row.
    """
    page_table, _, query_len, context_len = requests
    num_tokens = q.shape[0]
    kv = lax.bitcast_convert_type(kv, jnp.int8) if shape.is_fp8 else kv
    cache = [page_table, kv, *([] if scale is None else [scale])]
    # increments are the first rows, and their queries the first tokens
    rows = min(num_tokens, page_table.shape[0])
    pieces = cut_contexts(
        query_len[:rows],
        context_len[:rows],
        num_pieces=rows + pl.cdiv(items, shape.num_kv_heads),
        block=shape.block,
        sliding_window=scores.sliding_window,
    )
    sinks = [] if scores.sinks is None else [scores.sinks.astype(jnp.float32)]
    combined = _combine(shape, *_increments(shape, q, cache, pieces), pieces, sinks, q.dtype)
    out = combined[:, :, : shape.groups].reshape(rows, *q.shape[1:])
    out = jnp.pad(out, ((0, num_tokens - rows), (0, 0), (0, 0)))
    token = jnp.arange(num_tokens)[:, None, None]
    if num_tokens > 1:
        tiles = cut_queries(
            requests,
            size=chunk_shape.rows // shape.groups,
            num_tokens=num_tokens,
            block=chunk_shape.block,
            sliding_window=scores.sliding_window,
        )
        out = jnp.where(
            token < jnp.sum(query_len == 1), out, _chunks(chunk_shape, q, cache, tiles, sinks)
        )
    return jnp.where(token < query_len.sum(), out, jnp.zeros_like(out))


def _shape_of(q: jax.Array, pages: TokenMajorPages, scores: Scores, interpret: bool) -> TritonShape:
    """Parameters for increments: 32 KiB of K and V in a block, so that an Ampere card has room for three blocks.

    float32 is multiplied without tensor cores, with factors in registers. So blocks are half as large, and many rows
    get more warps.
    """
    head_dim = q.shape[2]
    kv_heads = num_kv_heads(pages, head_dim)
    groups = q.shape[1] // kv_heads
    # Pages of a narrower type are not worth products in float32, also for queries in float32.
    is_float = pages.dtype == jnp.float32
    dtype = jnp.float32 if is_float else jnp.float16 if pages.dtype == jnp.float16 else jnp.bfloat16
    widest = pl.next_power_of_2(head_dim) * (8 if is_float else 2)
    rows = max(LEAST_ROWS, pl.next_power_of_2(groups))
    return TritonShape(
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        groups=groups,
        page_size=pages.page_size,
        rows=rows,
        block=max(16, min(128, 2**14 // widest)),
        warps=8 if is_float and rows > LEAST_ROWS else 4,
        stages=3,
        dtype=dtype,
        is_fp8=pages.dtype == jnp.float8_e4m3fn,
        scores=replace(scores, sinks=None),
        interpret=interpret,
    )


def _for_chunks(shape: TritonShape) -> TritonShape:
    """Parameters for chunks: as many rows as registers allow. Sums of 128 x 128 take half the registers of 8 warps.

    float32 has no tensor cores here, and its factors also need registers, as do the converted values of fp8.
    """
    if shape.dtype == jnp.float32:
        return replace(shape, rows=max(32, shape.rows), block=min(32, shape.block), warps=8)
    is_wide = shape.head_dim > 128
    return replace(
        shape,
        rows=max(64 if is_wide else 128, shape.rows),
        block=32 if is_wide or shape.is_fp8 else 64,
        warps=8,
    )


def refusal(q: Float[Array, "T H D"] | jax.ShapeDtypeStruct, pages: KVPages) -> str | None:
    """The reason why these kernels cannot do these shapes, or None if they can."""
    head_dim = q.shape[2]
    if not isinstance(pages, TokenMajorPages):
        return "attention 'triton' supports token-major pages only"
    if pages.dtype.name not in PAGE_DTYPES:
        return (
            f"attention 'triton' supports pages of {', '.join(PAGE_DTYPES)}, not of {pages.dtype}"
        )
    if head_dim not in HEAD_DIMS:
        return f"attention 'triton' supports head dims {HEAD_DIMS}, not {head_dim}"
    if q.shape[1] // num_kv_heads(pages, head_dim) > 64:
        return "attention 'triton' supports at most 64 query heads for each KV head"
    if pages.is_quantised and 2**31 <= pages.kv.size <= 2**32:
        return "attention 'triton' cannot address 2 to 4 GiB of 8-bit pages by 32-bit offsets; use fewer or more pages"
    return None
