"""Ragged paged attention for CUDA cards before and after Hopper, through Pallas' Triton backend.

JAX has deprecated that backend, so everything that uses it is in this file. It stays for as long as Ampere and Ada have
no other way, and takes what `gpu.py` refuses on Hopper: float32, pages of 8 bits, head dim 256.

A page is packed (`kernels/kv_pages.py`). Triton reads by a pointer for each element, so a block of tokens may lie on
many pages or on a part of one; all page sizes are the same program:

                            block of C tokens of one request and one KV head
    page_table[row] ->  [page, slot, head * 2D : + D] is K, and [.. + D : + D] is V
    page 17             slot 14 | K D | V D |
                        slot 15 | K D | V D |           scores  [M, C] = q [M, D] . K^T
    page 3              slot 0  | K D | V D |           values  [M, D] = weights [M, C] . V
                        slot 1  | K D | V D |           M = queries * G, at least 16 as tensor cores want it

    Triton has powers of two only. D = 80 is 64 + 16 and D = 96 is 64 + 32: one product for each part, none padded.

One call is three kernels, because increments are bound by memory and chunks by arithmetic:

1. `_increments`, grid (KV head, piece). A program owns a piece of one context (`gpu_plan.py` cuts them so that few rows
   with long contexts fill the card too) and the G query heads that share K and V. Its loop owns a block of tokens at
   a time; the compiler prefetches `num_stages` of them. Neighbouring programs are heads of the same pages.
2. `_combine`, grid (KV head, row): its loop weighs the pieces of one row by their log-sum-exp.
3. `_chunks`, grid (KV head, tile). A program owns up to M / G consecutive queries of one request, with all G heads
   that share K and V, so that a short chunk fills a tile too. Tiles with the longest contexts come first. Blocks
   that every query sees go through a loop without masks, the others through a second one.

Tokens past a context are never read: their place is taken by the last one, whose score is masked; so memory that no
request wrote needs no care. Rows of a tile past its queries write to one place that nobody reads.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Float, Int, Num

from orca_jax.kernels.kv_pages import KVPages, PackedPages, num_kv_heads
from orca_jax.kernels.ragged_attention.gpu_plan import Pieces, Tiles, cut_contexts, cut_queries, most_pieces

_MASKED = -1e30  # finite: a fully masked block must not make NaN out of inf - inf
_LOG2E = math.log2(math.e)
_LEAST_ROWS = 16  # of a product on tensor cores
PARTS = {64: (64,), 80: (64, 16), 96: (64, 32), 128: (128,), 256: (256,)}  # of head dims, as powers of two
PAGE_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")
MULTIPROCESSORS = 132

Ref = Any  # Pallas has no public type for references


@dataclass(frozen=True)
class _Shape:
    """What the kernels of one call have in common; all static.

    Attributes:
        head_dim, num_kv_heads, page_size: D, K and S.
        groups: G, query heads that share one KV head.
        rows: M, rows of a product.
        block: C, tokens that are read and multiplied together.
        warps, stages: of a program, and blocks that the compiler reads ahead.
        dtype: of factors; sums are float32.
        is_fp8: whether pages are float8_e4m3fn, read as bytes.
        scale: factor on scores.
        sliding_window: tokens that a query sees, or None.
        soft_cap: bound on scores, or None.
        interpret: whether to interpret kernels instead of compiling them.
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
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    interpret: bool

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Where each part of D begins, and its size."""
        sizes = PARTS[self.head_dim]
        return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


class _Cache(NamedTuple):
    """References to what is read a block at a time."""

    kv: Ref  # [N, S, W]
    scale: Ref | None  # [N, 1, 2K]
    table: Ref  # [R, P]


class _Sight(NamedTuple):
    """What a program reads, and which of it each of its rows sees."""

    row: Int[Array, ""]
    head: Int[Array, ""]  # of K and V
    first: Int[Array, ""]  # token
    end: Int[Array, ""]  # past the last token; none is read from here on
    low: Int[Array, " M"]  # first token that a row sees
    last: Int[Array, " M"]
    known: Int[Array, ""]  # every row sees all tokens from `first` to here, if there is no window


class _Softmax(NamedTuple):
    """Online softmax of M rows: running maximum (of scores in bits), denominator, and weighted values by parts of D."""

    top: Float[Array, " M"]
    denominator: Float[Array, " M"]
    values: tuple[Float[Array, "M part"], ...]


def _empty(shape: _Shape, rows: int) -> _Softmax:
    values = tuple(jnp.zeros((rows, size), jnp.float32) for _, size in shape.parts)
    return _Softmax(jnp.full(rows, _MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), values)


def _attend(shape: _Shape, q: tuple[jax.Array, ...], cache: _Cache, sight: _Sight) -> _Softmax:
    """All blocks of a program: first those that need no mask."""

    def visit(i: jax.Array, state: _Softmax, *, is_masked: bool) -> _Softmax:
        token = sight.first + i * shape.block + jnp.arange(shape.block, dtype=jnp.int32)
        return _visit(shape, q, cache, sight, token, state, is_masked=is_masked)

    count = lax.div(sight.end - sight.first + (shape.block - 1), jnp.int32(shape.block))
    clear = jnp.int32(0)
    if shape.sliding_window is None:
        clear = lax.div(jnp.minimum(sight.known, sight.end) - sight.first, jnp.int32(shape.block))
    state = lax.fori_loop(jnp.int32(0), clear, partial(visit, is_masked=False), _empty(shape, shape.rows))
    return lax.fori_loop(clear, count, partial(visit, is_masked=True), state)


def _visit(
    shape: _Shape,
    q: tuple[jax.Array, ...],
    cache: _Cache,
    sight: _Sight,
    token: Int[Array, " C"],
    state: _Softmax,
    *,
    is_masked: bool,
) -> _Softmax:
    """One block of tokens."""
    seen = jnp.minimum(token, sight.end - 1) if is_masked else token
    page = cache.table[sight.row, lax.div(seen, jnp.int32(shape.page_size))]
    slot = lax.rem(seen, jnp.int32(shape.page_size))

    def read(part: int, begin: int, size: int) -> jax.Array:
        column = (2 * sight.head + part) * shape.head_dim + begin
        return _widen(shape, cache.kv[page, slot, pl.ds(column, size)])

    scores = reduce(jnp.add, (_product(x, read(0, *part).T) for x, part in zip(q, shape.parts, strict=True)))
    if cache.scale is not None:
        scores = scores * cache.scale[page, 0, 2 * sight.head][None, :]
    scores = _in_bits(shape, scores)
    if is_masked:
        visible = token[None, :] <= sight.last[:, None]
        if shape.sliding_window is not None:
            visible &= token[None, :] >= sight.low[:, None]
        scores = jnp.where(visible, scores, _MASKED)
    top = jnp.maximum(state.top, scores.max(axis=1))
    weights = jnp.exp2(scores - top[:, None])
    shrink = jnp.exp2(state.top - top)
    denominator = state.denominator * shrink + weights.sum(axis=1)
    if cache.scale is not None:
        weights = weights * cache.scale[page, 0, 2 * sight.head + 1][None, :]
    weights = weights.astype(shape.dtype)
    values = tuple(
        old * shrink[:, None] + _product(weights, read(1, *part))
        for old, part in zip(state.values, shape.parts, strict=True)
    )
    return _Softmax(top, denominator, values)


def _product(a: jax.Array, b: jax.Array) -> Float[Array, "M n"]:
    """float32 is multiplied as such, not rounded to the tensor cores' 10 bits."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=precision)


def _widen(shape: _Shape, stored: Num[Array, "C part"]) -> Num[Array, "C part"]:
    """Stored values as factors. Ampere cannot convert fp8: its bits are those of a float16, 2**8 too small."""
    if shape.is_fp8:
        bits = stored.astype(jnp.int16)  # the sign goes to the upper byte
        bits = (bits & jnp.int16(-(2**15))) | ((bits & jnp.int16(0x7F)) << jnp.int16(7))
        stored = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 256.0
    return stored.astype(shape.dtype)


def _in_bits(shape: _Shape, scores: Float[Array, "M C"]) -> Float[Array, "M C"]:
    """Scaled and capped, as base 2 logarithms: `exp2` is all that is left to do."""
    if shape.soft_cap is None:
        return scores * (shape.scale * _LOG2E)
    return jnp.tanh(scores * (shape.scale / shape.soft_cap)) * (shape.soft_cap * _LOG2E)


def _increments(
    shape: _Shape, q: Float[Array, "T H D"], cache: list[jax.Array], pieces: Pieces
) -> tuple[Float[Array, "I K G1 D"], Float[Array, "I K G1"]]:
    """Normalised values and log-sum-exp in bits of each piece; G + 1 rows, the last of which means nothing."""

    def kernel(q_ref: Ref, fields: Ref, total: Ref, *refs: Ref) -> None:
        head, piece = pl.program_id(0), pl.program_id(1)
        *inputs, out, mass = refs

        @pl.when(piece < total[0])
        def _exists() -> None:
            row, first, end, low = (fields[i, piece] for i in range(4))
            group = jnp.arange(shape.rows, dtype=jnp.int32)
            mine = head * shape.groups + jnp.minimum(group, shape.groups - 1)
            queries = tuple(q_ref[row, mine, pl.ds(*part)].astype(shape.dtype) for part in shape.parts)
            lows, lasts = (jnp.full(shape.rows, 1, jnp.int32) * bound for bound in (low, end - 1))
            sight = _Sight(row, head, first, end, lows, lasts, end)
            state = _attend(shape, queries, _cache(inputs), sight)
            place = jnp.minimum(group, shape.groups)
            for part, values in zip(shape.parts, state.values, strict=True):
                out[piece, head, place, pl.ds(*part)] = values / state.denominator[:, None]
            mass[piece, head, place] = state.top + jnp.log2(state.denominator)

    num_pieces, rows = pieces.fields.shape[1], (shape.num_kv_heads, shape.groups + 1)
    results = [
        jax.ShapeDtypeStruct((num_pieces, *rows, shape.head_dim), jnp.float32),
        jax.ShapeDtypeStruct((num_pieces, *rows), jnp.float32),
    ]
    launch = _launch(shape, kernel, "increments", (shape.num_kv_heads, num_pieces), results)
    out, mass = launch(q, pieces.fields, pieces.total, *cache)
    return out, mass


def _cache(inputs: list[Ref]) -> _Cache:
    """From the page table, the pages, and scales where there are any."""
    table, kv, *scale = inputs
    return _Cache(kv, scale[0] if scale else None, table)


def _combine(
    shape: _Shape, out: Float[Array, "I K G1 D"], mass: Float[Array, "I K G1"], pieces: Pieces, dtype: Any
) -> Float[Array, "R K G1 D"]:
    """The pieces of each row together; rows without pieces stay as they are in memory."""
    rows = pl.next_power_of_2(shape.groups)

    def kernel(values_ref: Ref, mass_ref: Ref, begin: Ref, count: Ref, result: Ref) -> None:
        head, row = pl.program_id(0), pl.program_id(1)
        place = jnp.minimum(jnp.arange(rows, dtype=jnp.int32), shape.groups)

        def add(i: jax.Array, state: _Softmax) -> _Softmax:
            piece = begin[row] + i
            mass = mass_ref[piece, head, place]
            top = jnp.maximum(state.top, mass)
            shrink, weight = jnp.exp2(state.top - top), jnp.exp2(mass - top)
            values = tuple(
                old * shrink[:, None] + values_ref[piece, head, place, pl.ds(*part)] * weight[:, None]
                for old, part in zip(state.values, shape.parts, strict=True)
            )
            return _Softmax(top, state.denominator * shrink + weight, values)

        @pl.when(count[row] > 0)
        def _any() -> None:
            state = lax.fori_loop(jnp.int32(0), count[row], add, _empty(shape, rows))
            for part, values in zip(shape.parts, state.values, strict=True):
                result[row, head, place, pl.ds(*part)] = (values / state.denominator[:, None]).astype(dtype)

    num_rows = pieces.begin.shape[0]
    results = [jax.ShapeDtypeStruct((num_rows, *out.shape[1:]), dtype)]
    launch = _launch(shape, kernel, "combine", (shape.num_kv_heads, num_rows), results)
    return launch(out, mass, pieces.begin, pieces.number)[0]


def _chunks(shape: _Shape, q: Float[Array, "T H D"], cache: list[jax.Array], tiles: Tiles) -> Float[Array, "T H D"]:
    """Attention of all tiles; other tokens' output stays as it is in memory."""
    num_tokens = q.shape[0]

    def kernel(q_ref: Ref, fields: Ref, total: Ref, *refs: Ref) -> None:
        head, tile = pl.program_id(0), total[0] - 1 - pl.program_id(1)
        *inputs, out = refs

        @pl.when(tile >= 0)
        def _exists() -> None:
            row, start, number, position, first, _ = (fields[i, tile] for i in range(6))
            index = jnp.arange(shape.rows, dtype=jnp.int32)
            query, group = lax.div(index, jnp.int32(shape.groups)), lax.rem(index, jnp.int32(shape.groups))
            mine, heads = jnp.minimum(query, number - 1), head * shape.groups + group
            queries = tuple(q_ref[start + mine, heads, pl.ds(*part)].astype(shape.dtype) for part in shape.parts)
            last = position + mine
            low = last + 1 - (shape.sliding_window or 0)
            sight = _Sight(row, head, first, position + number, low, last, position + 1)
            state = _attend(shape, queries, _cache(inputs), sight)
            place = jnp.where(query < number, start + query, num_tokens)
            for part, values in zip(shape.parts, state.values, strict=True):
                out[place, heads, pl.ds(*part)] = (values / state.denominator[:, None]).astype(out.dtype)

    results = [jax.ShapeDtypeStruct((num_tokens + 1, *q.shape[1:]), q.dtype)]
    grid = shape.num_kv_heads, tiles.fields.shape[1]
    launch = _launch(shape, kernel, "chunks", grid, results)
    return launch(q, tiles.fields, tiles.total, *cache)[0][:num_tokens]


def _launch(
    shape: _Shape,
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


@partial(jax.jit, static_argnames=("scale", "sliding_window", "soft_cap", "multiprocessors", "interpret"))
def ragged_attention_triton(
    q: Float[Array, "T H D"],
    pages: KVPages,
    page_table: Int[Array, "R P"],
    query_start: Int[Array, " R"],
    query_len: Int[Array, " R"],
    context_len: Int[Array, " R"],
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    multiprocessors: int = MULTIPROCESSORS,
    interpret: bool = False,
) -> Float[Array, "T H D"]:
    """See `ragged_attention`.

    Args:
        multiprocessors: how many the device has; another number costs speed and nothing else.
        interpret: run without a GPU.

    Raises:
        NotImplementedError: what `refusal` says.
    """
    if (reason := refusal(q, pages)) or not isinstance(pages, PackedPages):
        raise NotImplementedError(reason)
    num_tokens = q.shape[0]
    shape = _shape_of(q, pages, scale, sliding_window, soft_cap, interpret)
    kv = lax.bitcast_convert_type(pages.kv, jnp.int8) if shape.is_fp8 else pages.kv
    cache = [page_table, kv, *([] if pages.scale is None else [pages.scale])]
    rows = min(num_tokens, page_table.shape[0])  # increments are the first rows, and their queries the first tokens
    pieces = cut_contexts(
        query_len[:rows],
        context_len[:rows],
        num_pieces=most_pieces(rows, shape.num_kv_heads, multiprocessors),
        block=shape.block,
        sliding_window=sliding_window,
    )
    combined = _combine(shape, *_increments(shape, q, cache, pieces), pieces, q.dtype)
    out = combined[:, :, : shape.groups].reshape(rows, *q.shape[1:])
    out = jnp.pad(out, ((0, num_tokens - rows), (0, 0), (0, 0)))
    token = jnp.arange(num_tokens)[:, None, None]
    if num_tokens > 1:
        chunk_shape = _for_chunks(shape)
        cut = partial(cut_queries, num_tokens=num_tokens, block=chunk_shape.block, sliding_window=sliding_window)
        tiles = cut(query_start, query_len, context_len, size=chunk_shape.rows // shape.groups)
        out = jnp.where(token < jnp.sum(query_len == 1), out, _chunks(chunk_shape, q, cache, tiles))
    return jnp.where(token < query_len.sum(), out, jnp.zeros_like(out))


def _shape_of(
    q: jax.Array,
    pages: PackedPages,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    interpret: bool,
) -> _Shape:
    """Of increments: 32 KiB of K and V in a block, so that three blocks that are on their way fit an Ampere card.

    float32 is multiplied without tensor cores, with factors in registers: half as much, and more warps to many rows.
    """
    head_dim = q.shape[2]
    kv_heads = num_kv_heads(pages, head_dim)
    groups = q.shape[1] // kv_heads
    # What is stored in less is not worth float32's products, whatever type queries come in.
    is_float = pages.dtype == jnp.float32
    dtype = jnp.float32 if is_float else jnp.bfloat16
    widest = pl.next_power_of_2(head_dim) * (8 if is_float else 2)
    rows = max(_LEAST_ROWS, pl.next_power_of_2(groups))
    return _Shape(
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        groups=groups,
        page_size=pages.page_size,
        rows=rows,
        block=max(16, min(128, 2**14 // widest)),
        warps=8 if is_float and rows > _LEAST_ROWS else 4,
        stages=3,
        dtype=dtype,
        is_fp8=pages.dtype == jnp.float8_e4m3fn,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        interpret=interpret,
    )


def _for_chunks(shape: _Shape) -> _Shape:
    """More rows, as far as registers go: 128 by 128 sums take half of those of eight warps.

    float32 has no tensor cores here, and keeps its factors in registers too; so does what becomes of fp8.
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
    """Why these kernels cannot do this; None if they can."""
    head_dim = q.shape[2]
    if not isinstance(pages, PackedPages):
        return "attention 'triton' reads packed pages only"
    if pages.dtype.name not in PAGE_DTYPES:
        return f"attention 'triton' reads pages of {', '.join(PAGE_DTYPES)}, not of {pages.dtype}"
    if head_dim not in PARTS:
        return f"attention 'triton' has head dims {tuple(PARTS)}, not {head_dim}"
    if q.shape[1] // num_kv_heads(pages, head_dim) > 64:
        return "attention 'triton' takes at most 64 query heads for each KV head"
    if pages.is_quantised and 2**31 <= pages.kv.size <= 2**32:
        return "attention 'triton' has 32-bit places in 2 to 4 GiB of 8-bit pages; take fewer pages, or more"
    return None


attend = ragged_attention_triton
"""The name that the table of backends expects."""
