"""The requests of an iteration as operations on states take them.

A state is what a layer keeps of all tokens of a request so far, in an array of fixed size. The states of all layers of
a group are one array [N, ...], the *pool*. A request reads its state at one index and writes the state after its last
token at another one or at the same: a state whose index is never a target again is a snapshot.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Num


class StateRows(NamedTuple):
    """The requests of an iteration, in the order of `query_start`; absent ones last.

    Request r has the tokens `query_start[r] : query_start[r] + query_len[r]` of the merged ones. Tokens of no request
    are padding. No target is that of two present requests, nor the source of another one.
    """

    query_start: Int[Array, " R"]
    query_len: Int[Array, " R"]  # 0 for rows without a request: they write nothing
    source: Int[Array, " R"]  # index of the state before the first token
    target: Int[Array, " R"]  # index of the state after the last token
    # the first token is that of position 0: the state before it is zeros, `source` unread
    is_fresh: Bool[Array, " R"]

    def of_layer(self, first: int | Int[Array, ""]) -> "StateRows":
        """The rows with indices of a layer whose states begin at index `first` of the pool."""
        return self._replace(source=self.source + first, target=self.target + first)


class TokenRows(NamedTuple):
    """The request of each merged token."""

    row: Int[Array, " T"]  # 0 for padding
    offset: Int[Array, " T"]  # from the first token of the request in this iteration
    is_present: Bool[Array, " T"]  # False for padding


def token_rows(rows: StateRows, num_tokens: int) -> TokenRows:
    """Find the request of each token."""
    offset = jnp.arange(num_tokens, dtype=jnp.int32)[:, None] - rows.query_start
    is_in = (offset >= 0) & (offset < rows.query_len)  # [T, R]
    row = jnp.argmax(is_in, axis=1).astype(jnp.int32)
    return TokenRows(
        row, jnp.take_along_axis(offset, row[:, None], axis=1)[:, 0], is_in.any(axis=1)
    )


def states_before(states: Num[Array, "N *S"], rows: StateRows) -> Num[Array, "R *S"]:
    """The state of each request before its first token. Values of a pool at `source` of fresh rows may be NaN."""
    # A GPU would read the pool again while or after the new states are written, and copy it for that.
    found = jax.lax.optimization_barrier(states.at[rows.source].get(mode="clip"))
    return jnp.where(_like(rows.is_fresh, found), 0, found)


def write_states(
    states: Num[Array, "N *S"], rows: StateRows, new: Num[Array, "R *S"]
) -> Num[Array, "N *S"]:
    """The pool with the new states of the present requests."""
    target = jnp.where(rows.query_len > 0, rows.target, states.shape[0])
    return states.at[target].set(new.astype(states.dtype), mode="drop")


def _like(flags: Bool[Array, " R"], values: jax.Array) -> Bool[Array, "R *_"]:
    return flags.reshape(-1, *(1,) * (values.ndim - 1))
