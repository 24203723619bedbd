"""Quantised matrices, as all backends read them."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from orca_jax.values.config import Quantization
from orca_jax.values.layer_config import INT4_GROUP

MatrixKind = Quantization | Literal["fp4"]
"""The kind of stored values. Those of fp4 are numbers in e2m1, two in a byte, and half of a scale belongs to them."""

PER_BYTE: Mapping[MatrixKind, int] = {"int8": 1, "fp8": 1, "int4": 2, "fp4": 2}


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


def numbers_of(values: Num[Array, "*any"], kind: MatrixKind) -> tuple[Num[Array, "*any"], ...]:
    """The numbers of bytes: of two in a byte the low ones first. Those of fp4 are twice as large, and integers."""
    if PER_BYTE[kind] == 1:
        return (values,)
    found = lanes(values)
    if kind == "fp4":
        return tuple(map(_doubled_e2m1, found))
    return found


def _doubled_e2m1(codes: Num[Array, "*any"]) -> Num[Array, "*any"]:
    """Twice the numbers of codes: a sign, two bits of an exponent, and one of a fraction."""
    size = codes & jnp.int8(7)
    fraction = size & jnp.int8(1)
    shift = jnp.maximum((size >> jnp.int8(1)) - jnp.int8(1), jnp.int8(0))
    doubled = jnp.where(size < 2, size, lax.shift_left(fraction + jnp.int8(2), shift))
    return jnp.where(codes < 0, -doubled, doubled)


def in_groups(
    lane: Num[Array, "G S O"], scale: Float[Array, "G O"], zero: Num[Array, "G O"] | None
) -> Float[Array, "G S O"]:
    """The entries of a lane of stored values in float32."""
    values = lane.astype(jnp.float32)
    if zero is not None:
        values = values - zero[:, None].astype(jnp.float32)
    return values * scale[:, None].astype(jnp.float32)
