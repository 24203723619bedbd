"""The gated MLPs of experts, each on its own tokens: one operation, and the table of its backends.

    dense   the oracle: every expert on every token (`dense.py`)
    blocks  for CPUs: a loop over the experts in use, each on blocks of its tokens (`blocks.py`)
    ragged  for TPUs, and for kernels with grouped products: one product for the tokens of all experts (`ragged.py`)
    triton  for CUDA cards: a kernel for the tokens of all experts (`triton.py`)

XLA has ragged products for TPUs only. Elsewhere it computes them as products of every choice with every expert: even
more work than the oracle. On a GPU a loop with a dynamic trip count waits for the host at every pass.
"""

from typing import Any

from jaxtyping import Array, Float, Int

from orca_jax.kernels.backend import Backend, run_backend
from orca_jax.kernels.expert_mlp.parts import PLAIN, Activate, ExpertKernels, KernelForm, Routed

_HERE = "orca_jax.kernels.expert_mlp"

BACKENDS = (
    Backend("blocks", f"{_HERE}.blocks", "cpu"),
    Backend("ragged", f"{_HERE}.ragged", "tpu"),
    Backend("triton", f"{_HERE}.triton", "cuda"),
    Backend("dense", f"{_HERE}.dense"),
)
"""All run on every platform. A module has `mix_experts`, with the arguments of `expert_mlp`."""


def expert_mlp(
    x: Float[Array, "T E"],
    chosen: Int[Array, "T C"],
    weights: Float[Array, "T C"],
    kernels: ExpertKernels,
    *,
    activation: Activate,
    form: KernelForm = PLAIN,
    implementation: str | None = None,
) -> Float[Array, "T E"]:
    """The weighted sum of the chosen experts' results for each token, in float32.

    A token's result does not depend on the other tokens, except for rounding.

    Args:
        x: the tokens.
        chosen: the different experts of each token; X experts exist.
        weights: the weights of these experts.
        kernels: the matrices of all experts.
        activation: of the gate and the vector beside it.
        form: the arithmetic of the kernels; `blocks` multiplies with stored kernels, `ragged` by grouped products if
            there are some, and else all kernels are expanded.
        implementation: the name of a backend; None takes the default of the platform.

    Raises:
        NotImplementedError: the implementation does not exist.
    """

    def mix(backend: Any) -> Array:
        mixed: Array = backend.mix_experts(x, Routed(chosen, weights), kernels, activation, form)
        return mixed

    return run_backend("expert_mlp", BACKENDS, mix, implementation)
