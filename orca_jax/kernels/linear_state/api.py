"""Linear attention over merged requests: one operation, and the table of its backends.

reference  the oracle: token by token (`reference.py`)
xla        requests with one token all at once, the others in chunks (`xla.py`)
triton     the same for CUDA cards, by kernels (`triton.py`)
tpu        the same for TPUs, by kernels (`tpu.py`, `tpu_chunks.py`)
"""

from typing import Any

from jaxtyping import Array, Float

from orca_jax.kernels.backend import Backend, run_backend
from orca_jax.kernels.linear_state.parts import LinearTokens
from orca_jax.kernels.state_rows import StateRows

BACKENDS = (
    Backend("triton", "orca_jax.kernels.linear_state.triton", "cuda"),
    Backend("tpu", "orca_jax.kernels.linear_state.tpu", "tpu"),
    Backend("xla", "orca_jax.kernels.linear_state.xla"),
    Backend("reference", "orca_jax.kernels.linear_state.reference"),
)
"""A module has `attend`, with the arguments of `linear_state`."""


def linear_state(
    tokens: LinearTokens,
    states: Float[Array, "N H K V"],
    rows: StateRows,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H V"], Float[Array, "N H K V"]]:
    """Linear attention of each token in float32: `S = exp(decay) S + outer(k, u)`, then `q S`.

    The number `u` is `v` in lightning attention (arXiv 2405.17381) and Mamba-2 (arXiv 2405.21060). With `beta` the
    operation is the gated delta rule (arXiv 2412.06464), and `u = beta (v - k exp(decay) S)`, with the state before.

    Args:
        tokens: the inputs of all requests, flattened.
        states: the pool of matrices S of all heads; donated by the caller, so that the update is in place.
        rows: the requests; those with one token first.
        implementation: the name of a backend; None takes the default of the platform.

    Returns:
        The result of each token, zero for padding, and the pool with the states after the last tokens.

    Raises:
        NotImplementedError: the implementation does not exist.
    """

    def attend(backend: Any) -> tuple[Array, Array]:
        done: tuple[Array, Array] = backend.attend(tokens, states, rows)
        return done

    return run_backend("linear_state", BACKENDS, attend, implementation)
