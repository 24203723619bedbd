"""Linear attention of prompts on a TPU: requests with several tokens, in chunks of C.

    HBM   states [N, H, K, V], and results [T, H, V]; both are updated in place
    SMEM  of each chunk: its first token, its own tokens within what is read, and its request's states
    VMEM  some heads of a chunk and of a state, moved by Pallas; the state between two chunks

    for some heads                    the grid
        for chunk of all requests     in order
            for head                  in turns, so that the latencies of their products overlap

Tokens are the first axis, so a chunk begins at any token. A chunk near the end of all tokens is read from an earlier
one on. Tokens of others are masked, and their results are not written.

A chunk has the arithmetic of `xla.py`, with all factors of products in halves (`halves.py`). With `beta`, the numbers
that tokens add are the solution of a triangular system (`triangles.py`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from orca_jax.kernels.linear_state.halves import halves
from orca_jax.kernels.linear_state.parts import LinearTokens
from orca_jax.kernels.linear_state.triangles import CHUNK, inverse, joined, product, square
from orca_jax.kernels.state_rows import StateRows
from orca_jax.kernels.work_list import lay_out

PAIRS = 8  # queries and keys of a program: a tile
_MOST_HEADS = 32  # of a program
_TURNS = 4  # heads that take turns: more would need more registers than there are
_LANES = 128
_VMEM_LIMIT = 32 << 20

Ref = Any  # Pallas has no public type for references


class _Items(NamedTuple):
    """The chunks of all requests; references within the kernel. Later ones are copies without tokens."""

    place: Int[Array, " M"]  # the first token that is read
    begin: Int[Array, " M"]  # the first own token among those
    end: Int[Array, " M"]  # exclusive
    old: Int[Array, " M"]  # index of the state before the request
    new: Int[Array, " M"]  # and of the one after it
    is_fresh: Int[Array, " M"]
    is_first: Int[Array, " M"]  # of its request
    is_last: Int[Array, " M"]


def takes(num_heads: int, keys: int, values: int) -> bool:
    """True if states of this shape fill whole tiles."""
    return keys % _LANES == values % _LANES == 0 and _fills_tiles(num_heads)


def _fills_tiles(heads: int) -> bool:
    return heads % PAIRS == 0 or heads in (1, 2, 4)


def chunks(
    heads: LinearTokens,
    states: Float[Array, "N H K V"],
    rows: StateRows,
    out: Float[Array, "H T V"],
) -> tuple[Float[Array, "H T V"], Float[Array, "N H K V"]]:
    """The results of the requests with several tokens, written to `out`, and their states.

    Args:
        heads: at least `CHUNK` tokens. Heads that share a query and a key are in one program.
        states, rows: see `linear_state`; `takes` must accept the shape of a state.
        out: the results of the other requests.
    """
    total, items = _items(rows, heads.q.shape[1])
    run = partial(
        lax.platform_dependent,
        tpu=partial(_launch, interpret=False),
        default=partial(_launch, interpret=True),
    )
    tokens: LinearTokens = jax.tree.map(lambda x: x.swapaxes(0, 1), heads)
    pairs = tokens.q.shape[1]
    if not _fills_tiles(pairs) or min(PAIRS, pairs) * tokens.sharing > _MOST_HEADS:
        tokens = tokens.by_head()
    found: tuple[Array, Array] = lax.cond(
        total > 0,
        lambda out, states: run(total, items, tokens, out, states),
        lambda out, states: (out, states),
        out.swapaxes(0, 1),
        states,
    )
    return found[0].swapaxes(0, 1), found[1]


def _items(rows: StateRows, num_tokens: int) -> tuple[Int[Array, ""], _Items]:
    """The number of chunks, and the chunks."""
    is_long = rows.query_len > 1
    count = jnp.where(is_long, -(-rows.query_len // CHUNK), 0)
    listed = lay_out(count, num_tokens // CHUNK + min(len(count), num_tokens // 2))
    row = listed.row
    first = listed.within * CHUNK
    left = rows.query_len[row] - first
    start = rows.query_start[row] + first
    place = jnp.minimum(start, num_tokens - CHUNK)
    is_item = jnp.arange(len(row)) < listed.total
    is_read = is_long & ~rows.is_fresh
    items = _Items(
        place,
        start - place,
        jnp.where(is_item, start - place + jnp.minimum(left, CHUNK), 0),
        jnp.where(is_read, rows.source, rows.target)[row],
        rows.target[row],
        rows.is_fresh[row].astype(jnp.int32),
        (first == 0).astype(jnp.int32),
        (left <= CHUNK).astype(jnp.int32),
    )
    return listed.total[0], items


@partial(jax.jit, static_argnames="interpret")
def _launch(
    total: Int[Array, ""],
    items: _Items,
    tokens: LinearTokens,
    out: Float[Array, "T H V"],
    states: Float[Array, "N H K V"],
    interpret: Any,
) -> tuple[Float[Array, "T H V"], Float[Array, "N H K V"]]:
    """Run the kernel on at least one chunk."""
    num_heads, keys, values = states.shape[1:]
    pairs = min(PAIRS, tokens.q.shape[1])
    size = pairs * tokens.sharing

    def numbers(x: Float[Array, "T H"]) -> Float[Array, "J T 1 B"]:
        return x.reshape(len(x), -1, 1, size).swapaxes(0, 1)

    def of_tokens(count: int, width: int) -> pl.BlockSpec:
        def index(block: Array, item: Array, *refs: Ref) -> tuple[Any, ...]:
            return _Items(*refs).place[item], block * count, 0

        return pl.BlockSpec((pl.Element(CHUNK), pl.Element(count), pl.Element(width)), index)

    def of_state(name: str) -> pl.BlockSpec:
        def index(block: Array, item: Array, *refs: Ref) -> tuple[Any, ...]:
            return getattr(_Items(*refs), name)[item], block, 0, 0

        return pl.BlockSpec((None, size, keys, values), index)

    of_numbers = pl.BlockSpec(
        (None, pl.Element(CHUNK), pl.Element(1), pl.Element(size)),
        lambda block, item, *refs: (block, _Items(*refs).place[item], 0, 0),
    )
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    given = [tokens.q, tokens.k, tokens.v, numbers(tokens.decay)]
    of_keys = of_tokens(pairs, keys)
    specs = [of_keys, of_keys, of_tokens(size, values), of_numbers]
    if tokens.beta is not None:
        given.append(numbers(tokens.beta))
        specs.append(of_numbers)
    first = len(items) + len(given)
    run = pl.pallas_call(
        partial(_kernel, has_beta=tokens.beta is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(items),
            grid=(num_heads // size, total),
            in_specs=[*specs, anywhere, of_state("old")],
            out_specs=[anywhere, of_state("new")],
            scratch_shapes=[
                pltpu.VMEM((size, keys, values), jnp.float32),
                pltpu.VMEM((2, CHUNK, size, values), jnp.float32),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(out.shape, out.dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
        ],
        input_output_aliases={first: 0, first + 1: 1},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        name="state_chunks",
        interpret=interpret,
    )
    done = run(*items, *given, out, states)
    return done[0], done[1]


def _kernel(*refs: Ref, has_beta: bool) -> None:
    """Add one chunk to some heads of the state of its request."""
    items = _Items(*refs[:8])
    q, k, v, decay, *betas, _, old, out, new, state, results, sem = refs[8:]
    item = pl.program_id(1)
    size = v.shape[1]
    sharing = size // q.shape[1]

    @pl.when(items.is_first[item] > 0)
    def _begin() -> None:
        is_fresh = items.is_fresh[item] > 0
        state[...] = jnp.where(is_fresh, 0.0, old[...].astype(jnp.float32))

    number = lax.broadcasted_iota(jnp.int32, (CHUNK, 1), 0)
    is_own = (number >= items.begin[item]) & (number < items.end[item])
    since = _Since(jnp.where(is_own, decay[:, 0], 0.0))
    beta = jnp.where(is_own, betas[0][:, 0], 0.0) if has_beta else None
    slot = lax.rem(item, 2)

    def turns(head: int) -> Iterator[None]:
        pair = head // sharing
        vectors = q[:, pair], k[:, pair], v[:, head]
        own = _OwnTokens(*(jnp.where(is_own, each, 0.0) for each in vectors))
        scale = None if beta is None else beta[:, head : head + 1]
        there = results.at[slot, :, head]
        return _advance(own, since.of_head(head), scale, state.at[head], there)

    for head in range(0, size, _TURNS):
        for _ in zip(*map(turns, range(head, min(head + _TURNS, size))), strict=True):
            pass

    @pl.when(items.is_last[item] > 0)
    def _end() -> None:
        new[...] = state[...].astype(new.dtype)

    _store(out, results, sem, items)


class _OwnTokens(NamedTuple):
    """The vectors of a chunk; zeros for tokens of others."""

    q: Float[Array, "C K"]
    k: Float[Array, "C K"]
    v: Float[Array, "C V"]


class _Since:
    """The logarithms of what remains of the state before a chunk at each token, of some heads."""

    def __init__(self, decay: Float[Array, "C B"]) -> None:
        row, column = square(CHUNK)
        passed = jnp.where(row >= column, 1.0, 0.0)
        self.down = jnp.dot(
            passed,
            decay,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )  # [C, B]
        self.across = self.down.T  # the same numbers: what remains of a token at itself is 1

    def of_head(self, head: int) -> tuple[Float[Array, "C 1"], Float[Array, "1 C"]]:
        """The values of a head, as a column and as a row."""
        return self.down[:, head : head + 1], self.across[head : head + 1]


def _advance(
    own: _OwnTokens,
    since: tuple[Float[Array, "C 1"], Float[Array, "1 C"]],
    beta: Float[Array, "C 1"] | None,
    state: Ref,
    out: Ref,
) -> Iterator[None]:
    """Put the results of a chunk and the state of a head after it. Tokens of others are zeros, without a decay.

    Products take long, so heads take turns after each one: compilers keep this order.
    """
    row, column = square(CHUNK)
    down, across = since
    is_seen = row >= column
    # No difference is positive, so no factor is above 1.
    remains = jnp.where(is_seen, jnp.exp(jnp.where(is_seen, down - across, 0.0)), 0.0)
    # Products with keys and with the state at once: they fill the columns of a matrix unit.
    keys = halves(own.k)
    left = joined(keys, halves(own.q), axis=0)
    found = product(left, joined(keys.T, halves(state[...]), axis=1))
    yield
    products, known = found[:, :CHUNK], found[:, CHUNK:]
    held = jnp.exp(down)
    added = own.v
    if beta is not None:
        mutual = jnp.where(row > column, beta * remains * products[:CHUNK], 0.0)
        solve = yield from inverse(mutual)
        added = product(solve, halves(beta * (added - held * known[:CHUNK])))
        yield
    pairs = halves(remains * products[CHUNK:])
    out[...] = held * known[CHUNK:] + product(pairs, halves(added))
    last = down[CHUNK - 1 :]
    kept = halves(jnp.exp(last - down) * added)
    state[...] = jnp.exp(last) * state[...] + product(keys.T, kept)
    yield


def _store(out: Ref, results: Ref, sem: Ref, items: _Items) -> None:
    """Start to write the results of a chunk, and wait for the chunk before: the next one takes its memory."""
    block, item = pl.program_id(0), pl.program_id(1)
    size = results.shape[2]

    def each(item: Array, do: Callable[[Any], None]) -> None:
        """Do something with the transfers of the results of a chunk: one for each power of two in their number."""
        count = items.end[item] - items.begin[item]
        done = items.begin[item]
        power = CHUNK
        while power:
            is_in = lax.rem(lax.div(count, power), 2) > 0
            there = out.at[pl.ds(items.place[item] + done, power), pl.ds(block * size, size)]
            copy = pltpu.make_async_copy(
                results.at[lax.rem(item, 2), pl.ds(done, power)], there, sem
            )
            pl.when(is_in)(partial(do, copy))
            done = jnp.where(is_in, done + power, done)
            power //= 2

    pl.when(item > 0)(lambda: each(item - 1, lambda copy: copy.wait()))
    each(item, lambda copy: copy.start())
    pl.when(item == pl.num_programs(1) - 1)(lambda: each(item, lambda copy: copy.wait()))
