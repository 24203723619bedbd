"""Linear attention over merged requests: one operation, and the table of its implementations.

reference  the oracle: token by token (`reference.py`)
xla        requests with one token all at once, the others in chunks (`xla.py`)
"""

from collections.abc import Callable, Mapping

from jaxtyping import Array, Float

from orca_jax.kernels.backend import check_implementation
from orca_jax.kernels.linear_state.reference import linear_state_reference
from orca_jax.kernels.linear_state.xla import linear_state_xla
from orca_jax.kernels.state_rows import StateRows

IMPLEMENTATIONS: Mapping[str, Callable[[Array, Array, Array, Array, Array, StateRows], tuple[Array, Array]]] = {
    "reference": linear_state_reference,
    "xla": linear_state_xla,
}


def linear_state(
    q: Float[Array, "T H D"],
    k: Float[Array, "T H D"],
    v: Float[Array, "T H D"],
    slopes: Float[Array, " H"],
    states: Float[Array, "N H D D"],
    rows: StateRows,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "T H D"], Float[Array, "N H D D"]]:
    """Lightning attention (arXiv 2405.17381) of each token: `S = exp(-slope) S + outer(k, v)`, then `q S`, in float32.

    Args:
        q: queries of all requests, flattened.
        k: keys.
        v: values.
        slopes: decay of each head, at least 0.
        states: the pool of matrices S of all heads; donated by the caller, so that the update is in place.
        rows: the requests; those with one token first.
        implementation: a name of `IMPLEMENTATIONS`; None takes `xla`.

    Returns:
        The result of each token, zero for padding, and the pool with the states after the last tokens.

    Raises:
        NotImplementedError: the implementation does not exist.
    """
    check_implementation("linear_state", implementation, IMPLEMENTATIONS)
    return IMPLEMENTATIONS[implementation or "xla"](q, k, v, slopes, states, rows)
