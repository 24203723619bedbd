"""A loop over the experts in use, each on blocks of its tokens: for CPUs."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from orca_jax.kernels.expert_mlp.parts import (
    Activate,
    ExpertKernels,
    KernelForm,
    Routed,
    one_expert,
    sort_choices,
)

SMALL, LARGE = 8, 32  # rows of a block
_MANY = 16  # choices of an expert on average, from which blocks are large


def block_rows(num_choices: int, num_experts: int) -> int:
    """The rows of a block. Few choices of many experts fill small blocks only."""
    return LARGE if num_choices >= _MANY * num_experts else SMALL


def mix_experts(
    x: Float[Array, "T E"],
    routed: Routed,
    kernels: ExpertKernels,
    activation: Activate,
    form: KernelForm,
) -> Float[Array, "T E"]:
    """The arguments and the result of `api.expert_mlp`.

    Rows are in the order of experts. The last block of an expert may reach into the rows of the next one: these results
    have no meaning, and the next expert overwrites them.
    """
    choices = sort_choices(routed.chosen, kernels.num_experts)
    size = block_rows(routed.chosen.size, kernels.num_experts)
    rows = x[jnp.pad(choices.token, (0, size))]

    def run(expert: Array, first: Array, out: Array) -> Array:
        own = kernels.of(expert)  # once for all blocks

        def block(index: Array, out: Array) -> Array:
            start = first + index * size
            own_rows = lax.dynamic_slice_in_dim(rows, start, size)
            results = one_expert(own_rows, own, activation, form)
            return lax.dynamic_update_slice_in_dim(out, results, start, 0)

        return lax.fori_loop(0, (choices.sizes[expert] + size - 1) // size, block, out)

    def step(expert: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        first, out = carry
        count = choices.sizes[expert]
        out = lax.cond(count > 0, run, lambda expert, first, out: out, expert, first, out)
        return first + count, out

    empty = jnp.zeros((rows.shape[0], x.shape[1]), jnp.float32)
    _, out = lax.fori_loop(0, kernels.num_experts, step, (jnp.int32(0), empty))
    return choices.mix(out, routed.weights)
