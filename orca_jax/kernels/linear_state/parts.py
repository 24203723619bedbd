"""The inputs of linear attention."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class LinearTokens(NamedTuple):
    """The inputs of all tokens. The H heads may share G queries and keys."""

    q: Float[Array, "T G K"]
    k: Float[Array, "T G K"]
    v: Float[Array, "T H V"]
    # the logarithm of what remains of the state before the token, at most 0
    decay: Float[Array, "T H"]
    # the share of a value that is replaced; None: values are added
    beta: Float[Array, "T H"] | None = None
    # the query and key of each head; None: adjacent heads share one
    group: Int[Array, " H"] | None = None

    @property
    def sharing(self) -> int:
        """Adjacent heads with the same query and key."""
        return self.decay.shape[1] // self.q.shape[1]

    def by_head(self) -> "LinearTokens":
        """The same inputs with a query and a key for each head."""
        if self.group is not None:
            pair = (each[:, self.group] for each in (self.q, self.k))
        elif self.sharing > 1:
            pair = (jnp.repeat(each, self.sharing, axis=1) for each in (self.q, self.k))
        else:
            return self
        q, k = pair
        return self._replace(q=q, k=k, group=None)
