"""Products of sorted tokens with the experts of each, by XLA's `ragged_dot`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.expert_mlp.parts import Activate, precision_of, sort_choices


def by_ragged_products(
    x: Float[Array, "T E"],
    chosen: Int[Array, "T C"],
    weights: Float[Array, "T C"],
    gate: Float[Array, "X E F"],
    up: Float[Array, "X E F"],
    down: Float[Array, "X F E"],
    activation: Activate,
) -> Float[Array, "T E"]:
    """The arguments and the result of `api.expert_mlp`."""
    choices = sort_choices(chosen, gate.shape[0])

    def product(x: Array, kernels: Array) -> Array:
        return jax.lax.ragged_dot(
            x.astype(kernels.dtype),
            kernels,
            choices.sizes,
            precision=precision_of(kernels),
            preferred_element_type=jnp.float32,
        )

    rows = x[choices.token]
    return choices.mix(product(activation(product(rows, gate)) * product(rows, up), down), weights)
