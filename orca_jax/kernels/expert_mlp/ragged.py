"""Products of sorted tokens with the experts of each, by XLA's `ragged_dot` or that of the kernels' form."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from orca_jax.kernels.expert_mlp.parts import (
    Activate,
    ExpertKernels,
    KernelForm,
    Routed,
    sort_choices,
)
from orca_jax.kernels.matmul import precision_of


def mix_experts(
    x: Float[Array, "T E"],
    routed: Routed,
    kernels: ExpertKernels,
    activation: Activate,
    form: KernelForm,
) -> Float[Array, "T E"]:
    """The arguments and the result of `api.expert_mlp`."""
    count = form.num_experts or kernels.num_experts
    biases = kernels.biases
    choices = sort_choices(routed.chosen, count, form.num_rows)
    expert = jnp.repeat(
        jnp.arange(count), choices.sizes, total_repeat_length=choices.token.shape[0]
    )
    grouped = form.grouped or partial(_ragged_dots, form)

    def products(x: Array, stacks: list[Any], biases: list[Array]) -> list[Array]:
        found = grouped(x, stacks, choices.sizes)
        if not biases:
            return found
        return [rows + bias[expert] for rows, bias in zip(found, biases, strict=True)]

    inner = [kernel for kernel in (kernels.gate, kernels.up) if kernel is not None]
    *gate, up = products(
        x[choices.token], inner, [] if biases is None else [biases.gate, biases.up]
    )
    hidden = activation(gate[0] if gate else None, up)
    (results,) = products(hidden, [kernels.down], [] if biases is None else [biases.down])
    return choices.mix(results, routed.weights)


def _ragged_dots(
    form: KernelForm, x: Float[Array, "A I"], stacks: list[Any], sizes: Int[Array, "X"]
) -> list[Array]:
    return [
        jax.lax.ragged_dot(
            x.astype(kernel.dtype),
            kernel,
            sizes,
            precision=precision_of(kernel),
            preferred_element_type=jnp.float32,
        )
        for kernel in map(form.expand, stacks)
    ]
