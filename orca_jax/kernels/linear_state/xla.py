"""Linear attention in plain XLA.

Requests with one token are done together: this is all work of an iteration of increments, and reads and writes each of
their states once. Longer ones are cut into chunks of `CHUNK` tokens, in which products of matrices take the place of
the recurrence. A loop goes through the chunks of all requests, and carries the state from chunk to chunk.

With `beta`, the number that a token of a chunk adds depends on those of the tokens before it. They are the solution of
a triangular system of equations.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.linear_state.parts import LinearTokens
from orca_jax.kernels.state_rows import StateRows, states_before, write_states
from orca_jax.kernels.work_list import lay_out

CHUNK = 64  # tokens

_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


type _SingleTokens = Callable[[LinearTokens, Array, StateRows], tuple[Array, Array]]
type _SeveralTokens = Callable[[LinearTokens, Array, StateRows, Array], tuple[Array, Array]]


def attend(
    tokens: LinearTokens,
    states: Float[Array, "N H K V"],
    rows: StateRows,
    *,
    single_tokens: _SingleTokens | None = None,
    chunks: _SeveralTokens | None = None,
    room: int = 0,
) -> tuple[Float[Array, "T H V"], Float[Array, "N H K V"]]:
    """The results of single tokens, then those of chunks; see `linear_state`.

    Args:
        tokens, states, rows: see `linear_state`.
        single_tokens: the first part, by a kernel; None: `_single_tokens`.
        chunks: the second part, by a kernel; None: `_chunks`.
        room: tokens of zeros that the kernels get after the last one.
    """
    if tokens.group is not None:
        tokens = tokens.by_head()
    num_tokens = tokens.q.shape[0]

    def padded(x: Float[Array, "T H *N"]) -> Float[Array, "H P *N"]:
        wide = _heads_first(x.astype(jnp.float32))
        if not room:
            return wide
        return jnp.pad(wide, ((0, 0), (0, room), *((0, 0),) * (x.ndim - 2)))

    heads = jax.tree.map(padded, tokens)
    out, states = (single_tokens or _single_tokens)(heads, states, rows)
    if num_tokens > 1:
        out, states = (chunks or _chunks)(heads, states, rows, out)
    # Both parts write to zeros, and only the results of their own tokens.
    return out[:, :num_tokens].swapaxes(0, 1), states


def _single_tokens(
    heads: LinearTokens, states: Float[Array, "N H K V"], rows: StateRows
) -> tuple[Float[Array, "H T V"], Float[Array, "N H K V"]]:
    """The results of the requests with one token. They are the first ones, and no more than there are tokens."""
    num_tokens = heads.q.shape[1]
    rows, token = first_tokens(heads, rows)
    is_single = rows.query_len == 1
    state = jnp.exp(token.decay)[..., None, None] * states_before(states, rows).astype(jnp.float32)
    new = token.v
    if token.beta is not None:
        new = token.beta[..., None] * (new - _einsum("rhk,rhkv->rhv", token.k, state))
    state += _einsum("rhk,rhv->rhkv", token.k, new)
    place = jnp.where(is_single, rows.query_start, num_tokens)
    result = _einsum("rhk,rhkv->hrv", token.q, state)
    out = jnp.zeros(heads.v.shape, jnp.float32).at[:, place].set(result, mode="drop")
    return out, write_states(states, rows._replace(query_len=is_single.astype(jnp.int32)), state)


def first_tokens(heads: LinearTokens, rows: StateRows) -> tuple[StateRows, LinearTokens]:
    """As many rows as there are tokens, at most, and the first token of each row, [R, H, ..]."""
    num_tokens = heads.q.shape[1]
    rows = StateRows(*(each[:num_tokens] for each in rows))
    token: LinearTokens = jax.tree.map(
        lambda each: each.at[:, rows.query_start].get(mode="clip").swapaxes(0, 1), heads
    )
    return rows, token.by_head()


def _heads_first(x: Array) -> Array:
    """Tokens and heads in the other order."""
    return x.swapaxes(0, 1)


def _chunks(
    heads: LinearTokens,
    states: Float[Array, "N H K V"],
    rows: StateRows,
    out: Float[Array, "H T V"],
) -> tuple[Float[Array, "H T V"], Float[Array, "N H K V"]]:
    """The results of the requests with several tokens, added to `out`."""
    heads = jax.tree.map(_heads_first, jax.tree.map(_heads_first, heads).by_head())
    num_tokens = heads.q.shape[1]
    size = min(CHUNK, num_tokens)
    count = jnp.where(rows.query_len > 1, -(-rows.query_len // size), 0)
    items = lay_out(count, num_tokens // size + rows.query_len.shape[0])
    heads, out = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, size), *((0, 0),) * (x.ndim - 2))), (heads, out)
    )
    number = jnp.arange(size, dtype=jnp.int32)

    def chunk(
        item: Int[Array, ""], carry: tuple[Array, Array, Array]
    ) -> tuple[Array, Array, Array]:
        out, states, state = carry
        row = items.row[item]
        done = items.within[item] * size
        own = StateRows(*(jax.lax.dynamic_slice_in_dim(each, row, 1) for each in rows))
        state = jnp.where(done == 0, states_before(states, own)[0].astype(jnp.float32), state)
        start = own.query_start[0] + done
        left = own.query_len[0] - done

        def of_chunk(x: Float[Array, "H T *N"]) -> Float[Array, "H C *N"]:
            is_own = (number < left).reshape(-1, *(1,) * (x.ndim - 2))
            return jnp.where(is_own, jax.lax.dynamic_slice_in_dim(x, start, size, 1), 0)

        result, state = _results(jax.tree.map(of_chunk, heads), state)
        kept = jax.lax.dynamic_slice_in_dim(out, start, size, 1)
        is_own = (number < left)[:, None]
        out = jax.lax.dynamic_update_slice_in_dim(out, jnp.where(is_own, result, kept), start, 1)
        is_last = (left <= size).astype(jnp.int32)[None]
        return out, write_states(states, own._replace(query_len=is_last), state[None]), state

    state = jnp.zeros(states.shape[1:], jnp.float32)
    out, states, _ = jax.lax.fori_loop(0, items.total[0], chunk, (out, states, state))
    return out[:, :num_tokens], states


def _results(
    chunk: LinearTokens, state: Float[Array, "H K V"]
) -> tuple[Float[Array, "H C V"], Float[Array, "H K V"]]:
    """The results of a chunk's tokens, and the state after them. Tokens of others are zeros, without a decay."""
    q, k, new, decay, beta, _ = chunk
    since = jnp.cumsum(decay, axis=1)  # [H, C]: of the state before the chunk
    # What remains of a token at a later one. No difference is positive, so no factor is above 1.
    lower = jnp.tril(jnp.ones((q.shape[1],) * 2, bool))
    # [H, C, C]
    within = jnp.where(
        lower, jnp.exp(jnp.where(lower, since[:, :, None] - since[:, None, :], 0)), 0
    )
    if beta is not None:
        new = beta[..., None] * (
            new - _einsum("hck,hkv->hcv", k * jnp.exp(since)[..., None], state)
        )
        mutual = beta[..., None] * within * _einsum("hik,hjk->hij", k, k)
        new = jax.lax.linalg.triangular_solve(
            mutual, new, left_side=True, lower=True, unit_diagonal=True
        )
    result = _einsum("hij,hjv->hiv", _einsum("hik,hjk->hij", q, k) * within, new)
    result += _einsum("hck,hkv->hcv", q * jnp.exp(since)[..., None], state)
    state = jnp.exp(since[:, -1])[:, None, None] * state
    state += _einsum("hck,hcv->hkv", k * jnp.exp(since[:, -1:] - since)[..., None], new)
    return result, state
