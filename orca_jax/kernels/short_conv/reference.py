"""The oracle of short convolutions: one token after the other."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.state_rows import StateRows, states_before, token_rows, write_states


def convolve(
    x: Float[Array, "T C"],
    kernel: Float[Array, "W C"],
    states: Float[Array, "N S"],
    rows: StateRows,
) -> tuple[Float[Array, "T C"], Float[Array, "N S"]]:
    """The oracle of `short_conv`."""
    tokens = token_rows(rows, x.shape[0])
    taps = kernel.astype(jnp.float32)

    def step(
        seen: Float[Array, "R W1 C"], token: tuple[Float[Array, " C"], Int[Array, ""], Array]
    ) -> tuple[Float[Array, "R W1 C"], Float[Array, " C"]]:
        value, row, is_present = token
        window = jnp.concatenate([seen[row], value[None]])
        out = jnp.sum(window.astype(jnp.float32) * taps, axis=0)
        after = seen.at[row].set(window[1:])
        return jnp.where(is_present, after, seen), jnp.where(is_present, out, 0)

    inputs = x.astype(states.dtype), tokens.row, tokens.is_present
    before = states_before(states, rows)
    seen, out = jax.lax.scan(step, before.reshape(-1, kernel.shape[0] - 1, x.shape[1]), inputs)
    return out, write_states(states, rows, seen.reshape(before.shape))
