"""The oracle: every expert on every token. Experts that were not chosen have the weight 0."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from orca_jax.kernels.expert_mlp.parts import Activate, ExpertKernels, KernelForm, Routed
from orca_jax.kernels.matmul import precision_of


def mix_experts(
    x: Float[Array, "T E"],
    routed: Routed,
    kernels: ExpertKernels,
    activation: Activate,
    form: KernelForm,
) -> Float[Array, "T E"]:
    """The arguments and the result of `api.expert_mlp`. The weights are applied before the projections back."""

    def product(subscripts: str, x: Array, kernels: Array) -> Array:
        return jnp.einsum(
            subscripts,
            x.astype(kernels.dtype),
            kernels,
            precision=precision_of(kernels),
            preferred_element_type=jnp.float32,
        )

    up = product("te,xef->xtf", x, form.expand(kernels.up))
    gate = None if kernels.gate is None else product("te,xef->xtf", x, form.expand(kernels.gate))
    # [T, X]
    of_all = jnp.sum(
        jax.nn.one_hot(routed.chosen, kernels.num_experts) * routed.weights[..., None], axis=1
    )
    offset = jnp.float32(0)
    if (biases := kernels.biases) is not None and gate is not None:
        gate = gate + biases.gate[:, None]
        up = up + biases.up[:, None]
        offset = jnp.matmul(of_all, biases.down, precision=jax.lax.Precision.HIGHEST)
    hidden = (activation(gate, up) * of_all.T[..., None]).swapaxes(0, 1)  # [T, X, F]
    down = form.expand(kernels.down)  # [X, F, E]
    # One product over X and F together: with two axes XLA for GPUs transposes the matrices in every call.
    return (
        product("tf,fe->te", hidden.reshape(len(x), -1), down.reshape(-1, down.shape[-1])) + offset
    )
