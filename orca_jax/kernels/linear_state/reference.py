"""The oracle of linear attention: one token after the other."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from orca_jax.kernels.linear_state.parts import LinearTokens
from orca_jax.kernels.state_rows import StateRows, states_before, token_rows, write_states


def attend(
    tokens: LinearTokens, states: Float[Array, "N H K V"], rows: StateRows
) -> tuple[Float[Array, "T H V"], Float[Array, "N H K V"]]:
    """The oracle of `linear_state`."""
    tokens = tokens.by_head()
    place = token_rows(rows, tokens.q.shape[0])

    def step(
        held: Float[Array, "R H K V"], inputs: tuple[LinearTokens, Array, Array]
    ) -> tuple[Array, Array]:
        token, row, is_present = inputs
        state = jnp.exp(token.decay)[:, None, None] * held[row]
        new = token.v
        if token.beta is not None:
            new = token.beta[:, None] * (new - jnp.sum(token.k[:, :, None] * state, axis=1))
        state = state + token.k[:, :, None] * new[:, None, :]
        out = jnp.sum(token.q[:, :, None] * state, axis=1)
        return jnp.where(is_present, held.at[row].set(state), held), jnp.where(is_present, out, 0)

    inputs = (
        jax.tree.map(lambda each: each.astype(jnp.float32), tokens),
        place.row,
        place.is_present,
    )
    held, out = jax.lax.scan(step, states_before(states, rows).astype(jnp.float32), inputs)
    return out, write_states(states, rows, held)
