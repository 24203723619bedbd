"""The oracle of linear attention: one token after the other."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from orca_jax.kernels.state_rows import StateRows, states_before, token_rows, write_states


def linear_state_reference(
    q: Float[Array, "T H D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    slopes: Float[Array, " H"],
    states: Float[Array, "N H D D"],
    rows: StateRows,
) -> tuple[Float[Array, "T H D"], Float[Array, "N H D D"]]:
    """The oracle of `linear_state`."""
    tokens = token_rows(rows, q.shape[0])
    decay = jnp.exp(-slopes)[:, None, None]

    def step(held: Float[Array, "R H D D"], token: tuple[Array, ...]) -> tuple[Array, Array]:
        query, key, value, row, is_present = token
        state = decay * held[row] + key[:, :, None] * value[:, None, :]
        out = jnp.sum(query[:, :, None] * state, axis=1)
        return jnp.where(is_present, held.at[row].set(state), held), jnp.where(is_present, out, 0)

    inputs = *(each.astype(jnp.float32) for each in (q, k, v)), tokens.row, tokens.is_present
    held, out = jax.lax.scan(step, states_before(states, rows).astype(jnp.float32), inputs)
    return out, write_states(states, rows, held)
