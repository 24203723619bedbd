"""Numbers of 8 bits as wider ones, quickly on a CPU."""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Num

E4M3_IN_16 = 2.0**8
"""The ratio of a number in e4m3 to the one with the same bits in float16.

Both types have subnormal numbers, and their exponents differ by a constant.
"""


def bits_in_16(values: Num[Array, "*any"]) -> Float[Array, "*any"]:
    """Numbers in e4m3, divided by `E4M3_IN_16`, in float16. XLA:CPU takes some twenty times as long to convert them."""
    bits = lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint16)
    return lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)


def widened(values: Num[Array, "*any"], dtype: DTypeLike) -> Num[Array, "*any"]:
    """The same numbers in a wider type."""
    if values.dtype != jnp.float8_e4m3fn:
        return values.astype(dtype)
    return lax.platform_dependent(
        values,
        cpu=lambda values: bits_in_16(values).astype(dtype) * jnp.asarray(E4M3_IN_16, dtype),
        default=lambda values: values.astype(dtype),
    )
