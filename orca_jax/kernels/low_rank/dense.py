"""All slots of a layer in one product, of which each token takes its part: for GPUs."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from orca_jax.kernels.low_rank.parts import Operands, SlotPlan, Sum, split_ranks
from orca_jax.kernels.matmul import precision_of


def additions(
    x: Float[Array, "T I"],
    operands: Operands,
    plan: SlotPlan,
    is_active: Bool[Array, ""],
    total: Sum | None,
) -> tuple[Float[Array, "T _"], ...]:
    """The arguments and the result of `api.low_rank`."""
    shrink = operands.of_layer(operands.shrink)
    is_own = plan.slot[:, None] == jnp.arange(operands.num_slots)  # [T, N]
    all_slots = _contract(x.astype(shrink.dtype), shrink, ((1,), (1,)))  # [T, N, K]
    h = jnp.sum(jnp.where(is_own[:, :, None], all_slots, 0), axis=1)
    if total is not None:
        h = total(h)
    out = []
    for part, stack in zip(split_ranks(h, operands.expand), operands.expand, strict=True):
        matrices = operands.of_layer(stack)
        own = jnp.where(is_own[:, :, None], part[:, None, :], 0).astype(matrices.dtype)  # [T, N, R]
        out.append(_contract(own, matrices, ((1, 2), (0, 1))))
    return tuple(out)


def _contract(x: Array, y: Array, axes: tuple[tuple[int, ...], tuple[int, ...]]) -> Array:
    return jax.lax.dot_general(
        x, y, (axes, ((), ())), precision=precision_of(y), preferred_element_type=jnp.float32
    )
