"""Products of sorted tokens with the matrices of each slot, by XLA's `ragged_dot`: for TPUs."""

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

    def multiply(rows: Array, stack: Array) -> Array:
        matrices = operands.of_layer(stack)
        return jax.lax.ragged_dot(
            rows.astype(matrices.dtype),
            matrices,
            plan.sizes,
            precision=precision_of(matrices),
            preferred_element_type=jnp.float32,
        )

    h = multiply(x[plan.order], operands.shrink)
    if total is not None:
        h = total(h)
    parts = zip(split_ranks(h, operands.expand), operands.expand, strict=True)
    return tuple(multiply(part, stack)[plan.place] for part, stack in parts)
