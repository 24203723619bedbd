"""Products of sorted tokens with the experts of each, by XLA's `ragged_dot`."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.expert_mlp.parts import Activate, ExpertKernels, KernelForm, sort_choices
from orca_jax.kernels.matmul import precision_of


def mix_experts(
    x: Float[Array, "T E"],
    chosen: Int[Array, "T C"],
    weights: Float[Array, "T C"],
    kernels: ExpertKernels,
    activation: Activate,
    form: KernelForm,
) -> Float[Array, "T E"]:
    """The arguments and the result of `api.expert_mlp`."""
    choices = sort_choices(chosen, kernels.num_experts)
    biases = kernels.biases
    expert = jnp.repeat(jnp.arange(kernels.num_experts), choices.sizes, total_repeat_length=choices.token.shape[0])

    def product(x: Array, stored: Any, bias: Array | None) -> Array:
        kernel = form.expand(stored)
        rows = jax.lax.ragged_dot(
            x.astype(kernel.dtype),
            kernel,
            choices.sizes,
            precision=precision_of(kernel),
            preferred_element_type=jnp.float32,
        )
        return rows if bias is None else rows + bias[expert]

    gate, up, down = (None, None, None) if biases is None else biases
    rows = x[choices.token]
    gated = None if kernels.gate is None else product(rows, kernels.gate, gate)
    hidden = activation(gated, product(rows, kernels.up, up))
    return choices.mix(product(hidden, kernels.down, down), weights)
