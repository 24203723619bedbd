"""The oracle: the matrices of each token, gathered."""

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
    index = operands.first + plan.slot

    def multiply(x: Array, stack: Array) -> Array:
        return jnp.einsum(
            "ti,tio->to",
            x.astype(stack.dtype),
            stack[index],
            precision=precision_of(stack),
            preferred_element_type=jnp.float32,
        )

    h = multiply(x, operands.shrink)
    if total is not None:
        h = total(h)
    return tuple(
        multiply(part, b)
        for part, b in zip(split_ranks(h, operands.expand), operands.expand, strict=True)
    )
