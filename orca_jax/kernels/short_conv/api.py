"""Short convolutions over merged requests: one operation, and the table of its implementations.

reference  the oracle: token by token (`reference.py`)
xla        all tokens at once (`xla.py`)
"""

from collections.abc import Callable, Mapping

from jaxtyping import Array, Float

from orca_jax.kernels.backend import check_implementation
from orca_jax.kernels.short_conv.reference import short_conv_reference
from orca_jax.kernels.short_conv.xla import short_conv_xla
from orca_jax.kernels.state_rows import StateRows

IMPLEMENTATIONS: Mapping[str, Callable[[Array, Array, Array, StateRows], tuple[Array, Array]]] = {
    "reference": short_conv_reference,
    "xla": short_conv_xla,
}


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
        implementation: a name of `IMPLEMENTATIONS`; None takes `xla`.

    Returns:
        The result of each token, zero for padding, and the pool with the states after the last tokens.

    Raises:
        NotImplementedError: the implementation does not exist.
    """
    check_implementation("short_conv", implementation, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[implementation or "xla"](x, kernel, states, rows)
