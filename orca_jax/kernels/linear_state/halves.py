"""Products whose factors are sums of two numbers of bfloat16: 16 bits of a factor remain, and sums are float32."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


class HalfPair(NamedTuple):
    """Factors of a product as sums of two numbers of bfloat16, in arrays or references."""

    high: Any
    low: Any

    @property
    def T(self) -> "HalfPair":
        """The transposed matrix."""
        return HalfPair(self.high.T, self.low.T)

    @property
    def total(self) -> Array:
        """The factors in float32."""
        total: Array = self.high.astype(jnp.float32) + self.low.astype(jnp.float32)
        return total


def dot(a: HalfPair, b: HalfPair) -> Float[Array, "M N"]:
    """The product, without the lower half times the lower half."""
    one = partial(jnp.dot, preferred_element_type=jnp.float32)
    found: Array = one(a.high, b.low) + one(a.low, b.high) + one(a.high, b.high)
    return found


def halves(x: Float[Array, "*N"]) -> HalfPair:
    """The halves, by bits: compilers may leave out a conversion there and back."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    high = lax.bitcast_convert_type((bits + (1 << 15)) & -(1 << 16), jnp.float32)
    return HalfPair(high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16))
