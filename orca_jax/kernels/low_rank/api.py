"""Low-rank additions, `x @ A[slot] @ B[slot]` of each token: one operation, and the table of its backends.

    gather  the oracle: the matrices of each token, gathered (`gather.py`)
    blocks  for CPUs: a loop over tiles of tokens with the same slot (`blocks.py`)
    ragged  for TPUs: `jax.lax.ragged_dot` on the tokens sorted by slot (`ragged.py`)
    dense   for GPUs: all slots in one product, of which each token takes its part (`dense.py`)

On a CPU `ragged_dot` multiplies every token by every slot, as `dense` does: with 32 slots of rank 8 and 32 tokens of
GPT-2 this took the time of 60 % of the layers' own products, and `gather` that of 160 %, since it copies the matrices.
On a GPU a loop with a dynamic trip count waits for the host at every pass, and the products of all slots are narrow.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from orca_jax.kernels.backend import Backend, run_backend
from orca_jax.kernels.low_rank.parts import Operands, SlotPlan, Sum

_HERE = "orca_jax.kernels.low_rank"

BACKENDS = (
    Backend("blocks", f"{_HERE}.blocks", "cpu"),
    Backend("ragged", f"{_HERE}.ragged", "tpu"),
    Backend("dense", f"{_HERE}.dense"),
    Backend("gather", f"{_HERE}.gather"),
)
"""All run on every platform. A module has `additions`, with the arguments of `low_rank`."""


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
        implementation: the name of a backend; None takes the default of the platform.

    Raises:
        NotImplementedError: the implementation does not exist.
    """
    active = jnp.bool_(True) if is_active is None else is_active

    def add(backend: Any) -> tuple[Array, ...]:
        added: tuple[Array, ...] = backend.additions(x, operands, plan, active, total)
        return added

    return run_backend("low_rank", BACKENDS, add, implementation)
