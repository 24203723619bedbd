"""Linear attention in plain XLA.

Requests with one token are done together: this is all work of an iteration of increments, and reads and writes each of
their states once. Longer ones are cut into chunks of `CHUNK` tokens, in which products of matrices take the place of
the recurrence. A loop goes through the chunks of all requests, and carries the state from chunk to chunk.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.state_rows import StateRows, states_before, token_rows, write_states
from orca_jax.kernels.work_list import lay_out

CHUNK = 64  # tokens

_einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class _ByHead(NamedTuple):
    """Queries, keys and values, heads first."""

    q: Float[Array, "H T D"]
    k: Float[Array, "H T D"]
    v: Float[Array, "H T D"]


def linear_state_xla(
    q: Float[Array, "T H D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    slopes: Float[Array, " H"],
    states: Float[Array, "N H D D"],
    rows: StateRows,
) -> tuple[Float[Array, "T H D"], Float[Array, "N H D D"]]:
    """The results of single tokens, then those of chunks; see `linear_state`."""
    heads = _ByHead(*(each.astype(jnp.float32).swapaxes(0, 1) for each in (q, k, v)))
    out, states = _single_tokens(heads, slopes, states, rows)
    if q.shape[0] > 1:
        out, states = _chunks(heads, slopes, states, rows, out)
    is_present = token_rows(rows, q.shape[0]).is_present
    return jnp.where(is_present[:, None, None], out.swapaxes(0, 1), 0), states


def _single_tokens(
    heads: _ByHead, slopes: Float[Array, " H"], states: Float[Array, "N H D D"], rows: StateRows
) -> tuple[Float[Array, "H T D"], Float[Array, "N H D D"]]:
    """The results of the requests with one token. They are the first ones, and no more than there are tokens."""
    num_tokens = heads.q.shape[1]
    rows = StateRows(*(each[:num_tokens] for each in rows))
    is_single = rows.query_len == 1
    q, k, v = (each.at[:, rows.query_start].get(mode="clip") for each in heads)  # [H, R, D]
    before = states_before(states, rows).astype(jnp.float32)
    after = jnp.exp(-slopes)[:, None, None] * before + _einsum("hrd,hre->rhde", k, v)
    place = jnp.where(is_single, rows.query_start, num_tokens)
    out = jnp.zeros(heads.q.shape, jnp.float32).at[:, place].set(_einsum("hrd,rhde->hre", q, after), mode="drop")
    return out, write_states(states, rows._replace(query_len=is_single.astype(jnp.int32)), after)


def _chunks(
    heads: _ByHead,
    slopes: Float[Array, " H"],
    states: Float[Array, "N H D D"],
    rows: StateRows,
    out: Float[Array, "H T D"],
) -> tuple[Float[Array, "H T D"], Float[Array, "N H D D"]]:
    """The results of the requests with several tokens, added to `out`."""
    num_tokens = heads.q.shape[1]
    size = min(CHUNK, num_tokens)
    count = jnp.where(rows.query_len > 1, -(-rows.query_len // size), 0)
    items = lay_out(count, num_tokens // size + rows.query_len.shape[0])
    heads, out = jax.tree.map(lambda each: jnp.pad(each, ((0, 0), (0, size), (0, 0))), (heads, out))
    number = jnp.arange(size, dtype=jnp.int32)

    def decay(tokens: Int[Array, "*N"]) -> Float[Array, "H *N"]:
        """What remains after a number of tokens. No number is negative, so no factor is above 1."""
        return jnp.exp(-slopes.reshape(-1, *(1,) * tokens.ndim) * tokens.astype(jnp.float32))

    ahead = number[:, None] - number
    within = jnp.where(ahead >= 0, decay(jnp.maximum(ahead, 0)), 0)  # [H, C, C]: of earlier tokens of the chunk
    since = decay(number + 1)  # [H, C]: of the state before the chunk

    def chunk(item: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, states, state = carry
        row, done = items.row[item], items.within[item] * size
        own = StateRows(*(jax.lax.dynamic_slice_in_dim(each, row, 1) for each in rows))
        state = jnp.where(done == 0, states_before(states, own)[0].astype(jnp.float32), state)
        start, left = own.query_start[0] + done, own.query_len[0] - done
        is_own = (number < left)[:, None]
        q, k, v = (jnp.where(is_own, jax.lax.dynamic_slice_in_dim(each, start, size, 1), 0) for each in heads)
        result = _einsum("hij,hje->hie", _einsum("hid,hjd->hij", q, k) * within, v)
        result += _einsum("hid,hde->hie", q * since[:, :, None], state)
        kept = jax.lax.dynamic_slice_in_dim(out, start, size, 1)
        out = jax.lax.dynamic_update_slice_in_dim(out, jnp.where(is_own, result, kept), start, 1)
        last = jnp.minimum(left, size) - 1
        state = decay(last + 1)[:, None, None] * state
        state += _einsum("hcd,hce->hde", k * decay(jnp.maximum(last - number, 0))[:, :, None], v)
        is_last = (left <= size).astype(jnp.int32)[None]
        return out, write_states(states, own._replace(query_len=is_last), state[None]), state

    state = jnp.zeros(states.shape[1:], jnp.float32)
    out, states, _ = jax.lax.fori_loop(0, items.total[0], chunk, (out, states, state))
    return out[:, :num_tokens], states
