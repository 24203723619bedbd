"""Matrices of numbers in 4 to 8 bits with scales: one value for all formats, and the reference of its product."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales", "minima", "order"),
    meta_fields=("bits", "is_float"),
)
@dataclass(frozen=True)
class FewBits:
    """A matrix of numbers with scales. The entry of input i and output o is `scales[g, o] * values[i, o]`.

    Args:
        values: signed numbers of `bits` bits; with minima they are numbers from 0.
        scales: of groups of inputs; G divides I, and g = i * G // I.
        bits: 4, 5, 6 or 8.
        minima: subtracted from the entries of a group; None for none.
        order: the input of x that each row of the matrix multiplies; None for their own order.
        is_float: the values are floats of 8 bits, e4m3; without minima.
    """

    values: Any  # integers or e4m3 [I, O]. Each of these may be a shape
    scales: Any  # float [G, O]
    bits: int
    minima: Any = None  # float [G, O]
    order: Any = None  # int [I]
    is_float: bool = False

    def dequantised(self) -> Float[Array, "I O"]:
        """The matrix in float32. Its rows are in `order`."""
        size = self.values.shape[0] // self.scales.shape[0]

        def of_inputs(numbers: Array) -> Array:
            return jnp.repeat(numbers.astype(jnp.float32), size, axis=0)

        entries = self.values.astype(jnp.float32) * of_inputs(self.scales)
        if self.minima is None:
            return entries
        return entries - of_inputs(self.minima)

    def product(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        """`x` times the matrix in float32: the reference of `few_bits_product`."""
        if self.order is not None:
            x = x[:, self.order]
        return jnp.matmul(
            x.astype(jnp.float32), self.dequantised(), precision=jax.lax.Precision.HIGHEST
        )
