"""Short convolutions in plain XLA: a gather and a product for each tap."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from orca_jax.kernels.state_rows import StateRows, states_before, token_rows, write_states


def convolve(
    x: Float[Array, "T C"],
    kernel: Float[Array, "W C"],
    states: Float[Array, "N S"],
    rows: StateRows,
) -> tuple[Float[Array, "T C"], Float[Array, "N S"]]:
    """The sum over the taps, and the last inputs of each request; see `short_conv`."""
    num_tokens, channels = x.shape
    seen = kernel.shape[0] - 1
    x = x.astype(states.dtype)
    tokens = token_rows(rows, num_tokens)
    before = states_before(states, rows)  # [R, (W - 1) * C]
    # One array of all inputs: those of this iteration, and the last ones of each request before it.
    inputs = jnp.concatenate([x, before.reshape(-1, channels)])

    def place(row: Array, offset: Array) -> Array:
        """The index in `inputs` of a request's input at an offset, which is negative for those before."""
        older = num_tokens + row * seen + seen + offset
        return jnp.where(offset >= 0, rows.query_start[row] + offset, older)

    out = jnp.zeros(x.shape, jnp.float32)
    for tap in range(seen + 1):
        index = place(tokens.row, tokens.offset + (tap - seen))
        out += inputs.at[index].get(mode="clip").astype(jnp.float32) * kernel[tap].astype(
            jnp.float32
        )
    last = rows.query_len[:, None] + jnp.arange(-seen, 0)  # [R, W - 1]
    new = inputs.at[place(jnp.arange(last.shape[0])[:, None], last)].get(mode="clip")
    return jnp.where(tokens.is_present[:, None], out, 0), write_states(
        states, rows, new.reshape(before.shape)
    )
