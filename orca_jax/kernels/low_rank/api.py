"""Low-rank additions, `x @ A[slot] @ B[slot]` of each token: one operation, and the table of its implementations.

    gather  the oracle: the matrices of each token, gathered (`gather.py`)
    blocks  for CPUs: a loop over tiles of tokens with the same slot (`blocks.py`)
    ragged  for TPUs: `jax.lax.ragged_dot` on the tokens sorted by slot (`ragged.py`)
    dense   for GPUs: all slots in one product, of which each token takes its part (`dense.py`)

On a CPU `ragged_dot` multiplies every token by every slot, as `dense` does: with 32 slots of rank 8 and 32 tokens of
GPT-2 this took the time of 60 % of the layers' own products, and `gather` that of 160 %, since it copies the matrices.
On a GPU a loop with a dynamic trip count waits for the host at every pass, and the products of all slots are narrow.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from orca_jax.kernels.backend import check_implementation
from orca_jax.kernels.low_rank.blocks import by_blocks
from orca_jax.kernels.low_rank.dense import by_all_slots
from orca_jax.kernels.low_rank.gather import by_gather
from orca_jax.kernels.low_rank.parts import LowRankForm, Operands, SlotPlan, Sum
from orca_jax.kernels.low_rank.ragged import by_ragged_products

IMPLEMENTATIONS: Mapping[str, LowRankForm] = {
    "gather": by_gather,
    "blocks": by_blocks,
    "ragged": by_ragged_products,
    "dense": by_all_slots,
}
"""The implementations by name. All run on every platform."""


def low_rank(
    x: Float[Array, "T I"],
    operands: Operands,
    plan: SlotPlan,
    is_active: Bool[Array, ""] | None = None,
    *,
    total: Sum | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "T _"], ...]:
    """The addition of each token's adapter to the results of some linear layers with the same input, in float32.

    A token's result does not depend on the other tokens, except for rounding. It is zero in slot 0, if the matrices of
    this slot are zeros.

    Args:
        x: the inputs of the layers.
        operands: matrices of all slots and layers, and the layer.
        plan: the slot of each token.
        is_active: False if the matrices of all slots of these tokens are zeros, so that the work may be left out.
        total: sums a device's part over all devices that share the inputs; None if each device has all of them.
        implementation: a name of `IMPLEMENTATIONS`; None takes the default of the platform.

    Raises:
        NotImplementedError: the implementation does not exist.
    """
    check_implementation("low_rank", implementation, IMPLEMENTATIONS)
    active = jnp.bool_(True) if is_active is None else is_active

    def run(name: str) -> tuple[Array, ...]:
        return IMPLEMENTATIONS[name](x, operands, plan, active, total)

    if implementation is not None:
        return run(implementation)
    out: tuple[jax.Array, ...] = jax.lax.platform_dependent(
        cpu=lambda: run("blocks"), tpu=lambda: run("ragged"), default=lambda: run("dense")
    )
    return out
