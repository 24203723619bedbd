"""Short convolutions over merged requests: one operation, and the table of its backends.

reference  the oracle: token by token (`reference.py`)
xla        all tokens at once (`xla.py`)
tpu        the same for TPUs (`tpu.py`)
"""

from typing import Any

from jaxtyping import Array, Float

from orca_jax.kernels.backend import Backend, run_backend
from orca_jax.kernels.state_rows import StateRows

BACKENDS = (
    Backend("tpu", "orca_jax.kernels.short_conv.tpu", "tpu"),
    Backend("xla", "orca_jax.kernels.short_conv.xla"),
    Backend("reference", "orca_jax.kernels.short_conv.reference"),
)
"""A module has `convolve`, with the arguments of `short_conv`."""


def short_conv(
    x: Float[Array, "T C"],
    kernel: Float[Array, "W C"],
    states: Float[Array, "N S"],
    rows: StateRows,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T C"], Float[Array, "N S"]]:
    """The sum of `kernel[W - 1 - d] * x[t - d]` over the W newest tokens of the request of each token t, in float32.

    Inputs are rounded to the type of the states first, so that results do not depend on the chunks of a prompt.

    Args:
        x: inputs of all requests, flattened.
        kernel: the last tap is that of the token itself.
        states: the pool; a state has the last W - 1 inputs of a request, the newest one last, as one vector of
            S = (W - 1) * C values: XLA for TPUs copies a pool with an axis of W - 1. It is donated by the caller, so
            that the update is in place.
        rows: the requests.
        implementation: the name of a backend; None takes the default of the platform.

    Returns:
        The result of each token, zero for padding, and the pool with the states after the last tokens.

    Raises:
        NotImplementedError: the implementation does not exist.
    """

    def convolve(backend: Any) -> tuple[Array, Array]:
        done: tuple[Array, Array] = backend.convolve(x, kernel, states, rows)
        return done

    return run_backend("short_conv", BACKENDS, convolve, implementation)
