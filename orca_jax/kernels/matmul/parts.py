"""Quantised matrices, as all backends read them."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from orca_jax.values.layer_config import INT4_GROUP


class Quantised(NamedTuple):
    """Values and their scales; see the head of model/quantise.py."""

    values: Num[Array, "*layers J O"]
    scale: Float[Array, "*layers G O"] | Float[Array, "*layers O"]


def group_size(inputs: int, splits: int = 1) -> int:
    """Inputs for each scale of int4; or with inputs split over devices, for each scale and device."""
    return math.gcd(inputs // splits, INT4_GROUP)


def lanes(values: Num[Array, "*any"]) -> tuple[Num[Array, "*any"], Num[Array, "*any"]]:
    """The low and the high four bits of bytes, with their signs."""
    four = jnp.int8(4)
    return lax.shift_right_arithmetic(values << four, four), lax.shift_right_arithmetic(
        values, four
    )
