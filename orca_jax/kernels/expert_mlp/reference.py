"""The oracle: every expert on every token, then the chosen ones."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.expert_mlp.parts import Activation, one_expert


def by_choice(
    x: Float[Array, "T E"],
    chosen: Int[Array, "T C"],
    gate: Float[Array, "X E F"],
    up: Float[Array, "X E F"],
    down: Float[Array, "X F E"],
    activation: Activation,
) -> Float[Array, "T C E"]:
    """The arguments and the result of `api.expert_mlp`."""
    of_all = jax.lax.map(lambda kernels: one_expert(x, *kernels, activation), (gate, up, down))  # [X, T, E]
    return of_all[chosen, jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]]
