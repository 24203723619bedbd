"""Linear attention for CUDA cards, through Pallas' Triton backend.

Requests with one token are done by a kernel of their own, which reads and writes each state once. Longer ones are cut
into chunks of C tokens, and two kernels follow, without a question to the host:

1. `_factors`, grid (head, chunk). What depends on no state, for all chunks at once. Products of queries
   and earlier keys are weighted by what is left of a token. With `beta`, the numbers that tokens add
   are the solution of a triangular system. Its inverse is found by substitution in blocks of `BLOCK` rows: powers of
   the triangle lose all digits if keys are similar.
2. `_advance`, grid (columns of values, head, group of requests). A program keeps its columns of one state in registers,
   and goes through the chunks of a request: products of C rows in place of C steps.

Rows of a chunk past its request are copies of the last token. They add nothing to the state, and are not stored.
A factor of a product is the sum of two numbers of bfloat16: 16 bits of it remain. Sums are float32.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Array, Bool, Float, Int

from orca_jax.kernels.linear_state import xla
from orca_jax.kernels.linear_state.halves import HalfPair, dot, halves
from orca_jax.kernels.linear_state.parts import LinearTokens
from orca_jax.kernels.state_rows import StateRows, token_rows
from orca_jax.kernels.work_list import RowItems, lay_out

BLOCK = 32  # rows of a triangle that are solved one by one
CHUNK = 2 * BLOCK  # C
MOST_KEYS = 256  # rows of a state, of which registers hold some columns
_BLOCKS = ((0, 0), (1, 0), (1, 1))  # of a lower triangle
_LEAST = 16  # of an axis of a product on tensor cores
COLUMNS = 32  # of a state in one program, at most
_HELD = 4096  # numbers of a state in one program, at most
_GROUPS = 8  # of requests: programs whose requests are done wait for nothing
_INPUTS = 32  # of a product of queries and keys, at once
_WARPS = 4
_WARPS_OF_STATES = 8  # of programs that keep a state: no more than one fits on a multiprocessor
# Blocks or chunks that are read before they are needed. Two chunks fit into the shared memory of most cards.
_STAGES = 2
_KEYS_OF_STAGES = 128
_SMALL_CARDS = ("8.6", "8.9", "12.0", "12.1")  # compute capabilities with 99 KiB for a thread block

Ref = Any  # Pallas has no public type for references


@dataclass(frozen=True)
class _StateShape:
    """Static parameters of the kernels.

    Attributes:
        num_tokens, num_rows, num_heads, keys, values: T, R, H, K and V.
        sharing: adjacent heads with the same query and key, if no array says which.
        stages: chunks in shared memory.
        interpret: True to interpret the kernels instead of compiling them.
    """

    num_tokens: int
    num_rows: int
    num_heads: int
    sharing: int
    keys: int
    values: int
    stages: int
    interpret: bool

    @property
    def columns(self) -> int:
        """Columns of a state in one program."""
        return min(COLUMNS, _power(self.values), max(_LEAST, _HELD // _power(self.keys)))

    @property
    def blocks_of_values(self) -> int:
        """Programs for one state."""
        return -(-self.values // self.columns)

    @property
    def most_chunks(self) -> int:
        """M, chunks of all requests with several tokens, at most."""
        return self.num_tokens // CHUNK + min(self.num_rows, self.num_tokens // 2)

    @property
    def results(self) -> jax.ShapeDtypeStruct:
        """Results of all tokens."""
        return jax.ShapeDtypeStruct((self.num_tokens, self.num_heads, self.values), jnp.float32)


class _SplitTokens(NamedTuple):
    """`LinearTokens` with factors in halves."""

    q: HalfPair
    k: HalfPair
    v: Any
    decay: Any
    beta: Any | None
    group: Any | None

    def pair_of(self, shape: _StateShape, head: Array) -> Array:
        """The query and key of a head."""
        if self.group is not None:
            found: Array = self.group[head]
            return found
        return lax.div(head, jnp.int32(shape.sharing))


class _Axis(NamedTuple):
    """The places of a block on an axis, and which of them exist; None: all."""

    place: Int[Array, " B"]
    exists: Bool[Array, " B"] | None


class _Factors(NamedTuple):
    """What chunks need beside queries, keys and values. Each token has its row of the matrices of its chunk.

    Attributes:
        since: the logarithm of what remains of the state before the chunk, [H, T].
        pairs: the products of queries and keys, weighted, [H, T, C]; without those of later keys.
        solve: the matrix from lacking values to added ones, of the same shape; None without `beta`.
    """

    since: Any
    pairs: HalfPair
    solve: HalfPair | None


def attend(
    tokens: LinearTokens, states: Float[Array, "N H K V"], rows: StateRows
) -> tuple[Float[Array, "T H V"], Float[Array, "N H K V"]]:
    """The arguments and the result of `api.linear_state`."""
    if states.shape[2] > MOST_KEYS:
        return xla.attend(tokens, states, rows)
    capability = getattr(jax.devices()[0], "compute_capability", None)
    stages = _STAGES
    if capability in _SMALL_CARDS or states.shape[2] > _KEYS_OF_STAGES:
        stages = 1
    found: tuple[Array, Array] = lax.platform_dependent(
        tokens,
        states,
        rows,
        cuda=partial(_attend, stages=stages, interpret=False),
        default=partial(_attend, stages=stages, interpret=True),
    )
    return found


@partial(jax.jit, static_argnames=("stages", "interpret"))
def _attend(
    tokens: LinearTokens,
    states: Float[Array, "N H K V"],
    rows: StateRows,
    *,
    stages: int,
    interpret: bool,
) -> tuple[Float[Array, "T H V"], Float[Array, "N H K V"]]:
    """The results of single tokens, then those of chunks."""
    num_tokens = tokens.q.shape[0]
    shape = _StateShape(
        num_tokens=num_tokens,
        num_rows=len(rows.query_len),
        num_heads=states.shape[1],
        sharing=tokens.sharing,
        keys=states.shape[2],
        values=states.shape[3],
        stages=stages,
        interpret=interpret,
    )
    q, k = (halves(each.astype(jnp.float32)) for each in (tokens.q, tokens.k))
    inputs = _SplitTokens(q, k, tokens.v, tokens.decay, tokens.beta, tokens.group)
    given = rows._replace(is_fresh=rows.is_fresh.astype(jnp.int32))
    out, states = _single_tokens(shape, given, inputs, states)
    if num_tokens > 1:
        count = jnp.where(rows.query_len > 1, -(-rows.query_len // CHUNK), 0)
        items = lay_out(count, shape.most_chunks)
        factors = _factors(shape, given, items, inputs)
        out, states = _advance(shape, given, inputs, factors, states, out)
    is_present = token_rows(rows, num_tokens).is_present
    return jnp.where(is_present[:, None, None], out, 0), states


def _single_tokens(
    shape: _StateShape, rows: StateRows, tokens: _SplitTokens, states: Float[Array, "N H K V"]
) -> tuple[Float[Array, "T H V"], Float[Array, "N H K V"]]:
    """The results of the requests with one token, the first ones. No other result is written."""

    def kernel(own: StateRows, token: _SplitTokens, old: Ref, out: Ref, states: Ref) -> None:
        block, head, row = (pl.program_id(axis) for axis in range(3))

        @pl.when(own.query_len[row] == 1)
        def _is_single() -> None:
            at = own.query_start[row]
            axes = _axis(shape.keys), _axis(shape.values, block, shape.columns)
            state = jnp.exp(_numbers(token.decay, at, head)) * _before(old, own, row, head, axes)
            pair = token.pair_of(shape, head)
            q, k = (_vector(each, at, pair, axes[0]).total for each in (token.q, token.k))
            new = _vector(token.v, at, head, axes[1]).astype(jnp.float32)
            if token.beta is not None:
                found = jnp.sum(k[:, None] * state, axis=0)
                new = _numbers(token.beta, at, head) * (new - found)
            state += k[:, None] * new[None, :]
            result = jnp.sum(q[:, None] * state, axis=0)
            pltriton.store(out.at[at, head, axes[1].place], result, mask=axes[1].exists)
            _keep(states, own.target[row], head, axes, state)

    given = rows, tokens, states
    launch = pl.pallas_call(
        kernel,
        out_shape=[shape.results, jax.ShapeDtypeStruct(states.shape, states.dtype)],
        grid=(shape.blocks_of_values, shape.num_heads, min(shape.num_rows, shape.num_tokens)),
        input_output_aliases={len(jax.tree.leaves(given)) - 1: 1},
        compiler_params=pltriton.CompilerParams(num_warps=_WARPS),
        interpret=shape.interpret,
        name="state_increments",
    )
    out, states = launch(*given)
    return out, states


def _factors(
    shape: _StateShape, rows: StateRows, items: RowItems, tokens: _SplitTokens
) -> _Factors:
    """The factors of all chunks."""
    done = items.within * CHUNK
    start = rows.query_start[items.row] + done
    left = jnp.minimum(rows.query_len[items.row] - done, CHUNK)
    length = jnp.where(jnp.arange(len(left)) < items.total, left, 0)

    def kernel(start: Ref, length: Ref, token: _SplitTokens, *found: Ref) -> None:
        head = pl.program_id(0)
        item = pl.program_id(1)
        since, *matrices = found

        @pl.when(length[item] > 0)
        def _exists() -> None:
            parts = _parts(start[item], length[item], head, token)
            place = [
                _Axis(start[item] + _place(number), _place(number) < length[item])
                for number in (0, 1)
            ]
            for own, part in zip(place, parts, strict=True):
                pltriton.store(since.at[head, own.place], part.since, mask=own.exists)
            products = _products(shape, parts, token.pair_of(shape, head), token)
            for matrix, blocks in zip(matrices, products, strict=True):
                for (i, j), entries in blocks.items():
                    columns = _Axis(_place(j), None)
                    at = head, place[i].place[:, None], columns.place[None, :]
                    for half, values in zip(matrix, halves(entries), strict=True):
                        pltriton.store(half.at[at], values, mask=_mask(place[i], columns))

    vectors = shape.num_heads, shape.num_tokens
    half = jax.ShapeDtypeStruct((*vectors, CHUNK), jnp.bfloat16)
    matrices = [HalfPair(half, half)] * (1 if tokens.beta is None else 2)
    launch = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(vectors, jnp.float32), *matrices],
        grid=(shape.num_heads, shape.most_chunks),
        compiler_params=pltriton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=shape.interpret,
        name="state_factors",
    )
    since, pairs, *solve = launch(start, length, tokens)
    return _Factors(since, pairs, solve[0] if solve else None)


class _TriangleRows(NamedTuple):
    """The tokens of a block of a chunk."""

    at: Int[Array, " B"]
    since: Float[Array, " B"]
    beta: Float[Array, " B"] | None


def _parts(start: Array, length: Array, head: Array, token: _SplitTokens) -> list[_TriangleRows]:
    """Both blocks of a chunk that begins at token `start`."""
    parts = []
    before = jnp.float32(0)
    for number in (0, 1):
        place = _place(number)
        at = start + jnp.minimum(place, length - 1)
        since = before + jnp.cumsum(_numbers(token.decay, at, head))
        is_own = place < length
        before = jnp.min(jnp.where(is_own, since, before))  # at its last token
        beta = None if token.beta is None else _numbers(token.beta, at, head)
        parts.append(_TriangleRows(at, jnp.where(is_own, since, before), beta))
    return parts


def _products(
    shape: _StateShape, parts: list[_TriangleRows], pair: Array, token: _SplitTokens
) -> list[dict[tuple[int, int], Float[Array, "B B"]]]:
    """The blocks of `_Factors.pairs`, and of `_Factors.solve` with `beta`."""
    size = min(_INPUTS, _power(shape.keys))
    has_beta = token.beta is not None

    def add(index: Array, totals: list[dict[Any, Array]]) -> list[dict[Any, Array]]:
        key = _axis(shape.keys, index, size)
        keys = [_matrix(token.k, part.at, pair, key) for part in parts]
        queries = [_matrix(token.q, part.at, pair, key) for part in parts]
        done = []
        for rows, each in zip((queries, keys), totals, strict=False):
            done.append({(i, j): each[i, j] + dot(rows[i], keys[j].T) for i, j in each})
        return done

    zeros = {place: jnp.zeros((BLOCK, BLOCK), jnp.float32) for place in _BLOCKS}
    count = pl.cdiv(_power(shape.keys), size)
    pairs, *mutual = lax.fori_loop(0, count, add, [zeros] * (1 + has_beta))
    row, column = _square()
    remaining = {
        (i, j): _remains(
            parts[i].since[:, None] - parts[j].since[None, :], row + (i - j) * BLOCK >= column
        )
        for i, j in _BLOCKS
    }
    zero = {(0, 1): zeros[0, 0]}
    found = [zero | {place: pairs[place] * remaining[place] for place in _BLOCKS}]
    if mutual:
        found.append(zero | _solution(parts, mutual[0], remaining[1, 0]))
    return found


def _remains(since: Float[Array, "B B"], is_seen: Bool[Array, "B B"]) -> Float[Array, "B B"]:
    """What remains of a token at a later one: no exponent is positive."""
    return jnp.where(is_seen, jnp.exp(jnp.where(is_seen, since, 0.0)), 0.0)


def _solution(
    parts: list[_TriangleRows],
    mutual: dict[tuple[int, int], Float[Array, "B B"]],
    remaining: Float[Array, "B B"],
) -> dict[tuple[int, int], Float[Array, "B B"]]:
    """The inverse of the triangle of a chunk, times `beta`: two blocks, and the product that joins them.

    The rows of an inverse follow from earlier rows: `X[i] = e[i] - sum(M[i, j] X[j] for j < i)`. Products of keys are
    symmetric, so the transposed triangle is at hand: its column i has the factors of the rows of X.

    Args:
        parts: both blocks of tokens.
        mutual: the products of their keys.
        remaining: what remains of tokens of the first block at those of the second.
    """
    row, column = _square()
    betas = [part.beta[None, :] for part in parts if part.beta is not None]
    triangles = []
    for number, part in enumerate(parts):
        remains = _remains(part.since[None, :] - part.since[:, None], column > row)
        triangles.append(mutual[number, number] * remains * betas[number])

    def step(index: Array, inverses: list[Array]) -> list[Array]:
        done = []
        for each, inverse in zip(triangles, inverses, strict=True):
            factors = jnp.sum(jnp.where(column == index, each, 0.0), axis=1)
            known = jnp.sum(factors[:, None] * inverse, axis=0)
            done.append(jnp.where(row == index, inverse - known[None, :], inverse))
        return done

    unit = jnp.where(row == column, 1.0, 0.0)
    first, second = lax.fori_loop(1, BLOCK, step, [unit, unit])
    weighted = mutual[1, 0] * remaining * jnp.reshape(betas[1], (BLOCK, 1))
    joined = -dot(halves(dot(halves(second), halves(weighted))), halves(first))
    return {(0, 0): first * betas[0], (1, 0): joined * betas[0], (1, 1): second * betas[1]}


def _advance(
    shape: _StateShape,
    rows: StateRows,
    tokens: _SplitTokens,
    factors: _Factors,
    states: Float[Array, "N H K V"],
    out: Float[Array, "T H V"],
) -> tuple[Float[Array, "T H V"], Float[Array, "N H K V"]]:
    """The results of the requests with several tokens, written to `out`, and their states."""
    groups = min(_GROUPS, shape.num_rows)

    def kernel(own: StateRows, token: _SplitTokens, factor: _Factors, *refs: Ref) -> None:
        old, _, out, states = refs
        block, head, group = (pl.program_id(axis) for axis in range(3))
        axes = _axis(shape.keys), _axis(shape.values, block, shape.columns)
        pair = token.pair_of(shape, head)
        number = jnp.arange(CHUNK, dtype=jnp.int32)

        def chunk(row: Array, index: Array, state: Float[Array, "K B"]) -> Float[Array, "K B"]:
            first = own.query_start[row] + index * CHUNK
            left = own.query_len[row] - index * CHUNK
            at = first + jnp.minimum(number, left - 1)
            held = halves(state)
            since = factor.since[head, at]
            last = factor.since[head, first + jnp.minimum(left, CHUNK) - 1]
            tokens = _Axis(first + number, number < left)
            k = _matrix(token.k, at, pair, axes[0])
            new = _matrix(token.v, at, head, axes[1]).astype(jnp.float32)
            if factor.solve is not None:
                new -= jnp.exp(since)[:, None] * dot(k, held)
                new = dot(_chunk(factor.solve, tokens, head), halves(new))
            result = jnp.exp(since)[:, None] * dot(_matrix(token.q, at, pair, axes[0]), held)
            result += dot(_chunk(factor.pairs, tokens, head), halves(new))
            place = out.at[tokens.place[:, None], head, axes[1].place[None, :]]
            pltriton.store(place, result, mask=_mask(tokens, axes[1]))
            kept = jnp.where((number < left)[:, None], jnp.exp(last - since)[:, None] * new, 0.0)
            return jnp.exp(last) * state + dot(k.T, halves(kept))

        def request(index: Array, _: None) -> None:
            row = group + index * groups

            @pl.when(own.query_len[row] > 1)
            def _is_long() -> None:
                state = _before(old, own, row, head, axes)
                chunks = lax.div(own.query_len[row] + (CHUNK - 1), jnp.int32(CHUNK))
                state = lax.fori_loop(jnp.int32(0), chunks, partial(chunk, row), state)
                _keep(states, own.target[row], head, axes, state)

        of_group = lax.div(shape.num_rows - group + (groups - 1), jnp.int32(groups))
        lax.fori_loop(jnp.int32(0), of_group, request, None)

    given = rows, tokens, factors, states, out
    count = len(jax.tree.leaves(given))
    launch = pl.pallas_call(
        kernel,
        out_shape=[shape.results, jax.ShapeDtypeStruct(states.shape, states.dtype)],
        grid=(shape.blocks_of_values, shape.num_heads, groups),
        input_output_aliases={count - 2: 1, count - 1: 0},
        compiler_params=pltriton.CompilerParams(
            num_warps=_WARPS_OF_STATES, num_stages=shape.stages
        ),
        interpret=shape.interpret,
        name="state_chunks",
    )
    out, states = launch(*given)
    return out, states


def _before(
    states: Ref, own: StateRows, row: Array, head: Array, axes: tuple[_Axis, _Axis]
) -> Float[Array, "K B"]:
    """Columns of the state of a request before its first token."""
    is_fresh = own.is_fresh[row] > 0
    index = jnp.where(is_fresh, own.target[row], own.source[row])
    key, value = axes
    place = states.at[index, head, key.place[:, None], value.place[None, :]]
    found = _load(place, _mask(key, value)).astype(jnp.float32)
    return jnp.where(is_fresh, jnp.zeros_like(found), found)


def _keep(
    states: Ref, index: Array, head: Array, axes: tuple[_Axis, _Axis], new: Float[Array, "K B"]
) -> None:
    """Store columns of a state."""
    key, value = axes
    place = states.at[index, head, key.place[:, None], value.place[None, :]]
    pltriton.store(place, new.astype(states.dtype), mask=_mask(key, value))


def _mask(first: _Axis, second: _Axis) -> Bool[Array, "A B"] | None:
    """Which entries of a matrix exist; None: all."""
    if first.exists is None and second.exists is None:
        return None
    rows, columns = (
        axis.place >= 0 if axis.exists is None else axis.exists for axis in (first, second)
    )
    return rows[:, None] & columns[None, :]


def _power(size: int) -> int:
    """The size of a block for an axis: Triton has powers of two, and tensor cores multiply 16."""
    return max(_LEAST, pl.next_power_of_2(size))


def _axis(whole: int, index: Any = 0, size: int | None = None) -> _Axis:
    """A block of an axis of length `whole`; without a size all of it."""
    size = size or _power(whole)
    place = index * size + jnp.arange(size, dtype=jnp.int32)
    return _Axis(place, None if whole % size == 0 else place < whole)


def _place(number: int) -> Int[Array, " B"]:
    """The tokens of a block, from the first one of the chunk."""
    return number * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)


def _square() -> tuple[Int[Array, "B 1"], Int[Array, "1 B"]]:
    """The rows and the columns of a block."""
    number = jnp.arange(BLOCK, dtype=jnp.int32)
    return number[:, None], number[None, :]


def _load(place: Ref, mask: Any) -> Array:
    found: Array = pltriton.load(place, mask=mask, other=None if mask is None else 0.0)
    return found


def _matrix(refs: Any, at: Int[Array, " B"], head: Array, axis: _Axis) -> Any:
    """Vectors of some tokens, of one reference or of each half."""
    mask = _mask(_Axis(at, None), axis)
    return jax.tree.map(lambda x: _load(x.at[at[:, None], head, axis.place[None, :]], mask), refs)


def _chunk(halves: HalfPair, tokens: _Axis, head: Array) -> HalfPair:
    """The matrix of a chunk; zeros in rows that do not exist."""
    columns = _axis(CHUNK)
    at = head, tokens.place[:, None], columns.place[None, :]
    return HalfPair(*(_load(half.at[at], _mask(tokens, columns)) for half in halves))


def _vector(refs: Any, at: Array, head: Array, axis: _Axis) -> Any:
    """The vector of a token, of one reference or of each half."""
    return jax.tree.map(lambda x: _load(x.at[at, head, axis.place], axis.exists), refs)


def _numbers(ref: Ref, at: Array, head: Array) -> Array:
    """The numbers of some tokens, or of one."""
    found: Array = ref[at, head].astype(jnp.float32)
    return found
