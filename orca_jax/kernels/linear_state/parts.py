"""The inputs of linear attention."""

from typing import NamedTuple

from jaxtyping import Array, Float


class LinearTokens(NamedTuple):
    """The inputs of all tokens."""

    q: Float[Array, "T H K"]
    k: Float[Array, "T H K"]
    v: Float[Array, "T H V"]
    # the logarithm of what remains of the state before the token, at most 0
    decay: Float[Array, "T H"]
    # the share of a value that is replaced; None: values are added
    beta: Float[Array, "T H"] | None = None
