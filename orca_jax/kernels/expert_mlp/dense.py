"""The oracle: every expert on every token. Experts that were not chosen have the weight 0."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.expert_mlp.parts import Activate, ExpertKernels, KernelForm, precision_of


def by_all_experts(
    x: Float[Array, "T E"],
    chosen: Int[Array, "T C"],
    weights: Float[Array, "T C"],
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

    gate, up, down = map(form.expand, kernels)
    hidden = activation(product("te,xef->xtf", x, gate)) * product("te,xef->xtf", x, up)
    of_all = jnp.sum(jax.nn.one_hot(chosen, kernels.num_experts) * weights[..., None], axis=1)  # [T, X]
    return product("xtf,xfe->te", hidden * of_all.T[..., None], down)
