"""Products of sorted tokens with the experts of each, by XLA's `ragged_dot`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.expert_mlp.parts import Activate, ExpertKernels, KernelForm, precision_of, sort_choices


def by_ragged_products(
    x: Float[Array, "T E"],
    chosen: Int[Array, "T C"],
    weights: Float[Array, "T C"],
    kernels: ExpertKernels,
    activation: Activate,
    form: KernelForm,
) -> Float[Array, "T E"]:
    """The arguments and the result of `api.expert_mlp`."""
    choices = sort_choices(chosen, kernels.num_experts)
    gate, up, down = map(form.expand, kernels)

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
