"""Quantised matrices, as all backends read them."""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from orca_jax.values.layer_config import INT4_GROUP


class Quantised(NamedTuple):
    """Values and their scales; see the head of model/quantise.py.

    A scale of groups has an axis for them, and G divides the inputs: an entry is `(value - zero) * scale` there. Zero
    points are integers near those of the values; None for none, and in fp8.
    """

    values: Num[Array, "*layers J O"]
    scale: Float[Array, "*layers G O"] | Float[Array, "*layers O"]
    zero: Num[Array, "*layers G O"] | None = None

    @property
    def is_grouped(self) -> bool:
        """True if the inputs of an output have several scales."""
        return self.scale.ndim == self.values.ndim


def group_size(inputs: int, splits: int = 1) -> int:
    """Inputs for each scale of int4; or with inputs split over devices, for each scale and device."""
    return math.gcd(inputs // splits, INT4_GROUP)


def lanes(values: Num[Array, "*any"]) -> tuple[Num[Array, "*any"], Num[Array, "*any"]]:
    """The low and the high four bits of bytes, with their signs."""
    four = jnp.int8(4)
    return lax.shift_right_arithmetic(values << four, four), lax.shift_right_arithmetic(
        values, four
    )


def in_groups(
    lane: Num[Array, "G S O"], scale: Float[Array, "G O"], zero: Num[Array, "G O"] | None
) -> Float[Array, "G S O"]:
    """The entries of a lane of stored values in float32."""
    values = lane.astype(jnp.float32)
    if zero is not None:
        values = values - zero[:, None].astype(jnp.float32)
    return values * scale[:, None].astype(jnp.float32)
