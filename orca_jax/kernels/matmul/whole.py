"""Products that convert all values, in the same operation as the product if the compiler joins them."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from orca_jax.kernels.matmul.api import dot, matmul
from orca_jax.kernels.matmul.parts import MatrixKind, Quantised, in_groups, numbers_of


def multiply(
    x: Float[Array, "T I"], weight: Quantised, kind: MatrixKind, splits: int
) -> Float[Array, "T O"]:
    """`x` times the matrix; one device adds up the inputs of all, so that `splits` has no meaning here."""
    if not weight.is_grouped:
        return dot("ti,io->to", x, weight.values.astype(x.dtype)) * weight.scale
    groups = weight.values.reshape(weight.scale.shape[0], -1, weight.values.shape[1])
    found = numbers_of(groups, kind)
    count = len(found)
    scaled = (in_groups(lane, weight.scale, weight.zero) for lane in found)
    pairs = (
        (x[:, lane::count], each.reshape(weight.values.shape)) for lane, each in enumerate(scaled)
    )
    return sum(
        (dot("ti,io->to", inputs, each.astype(x.dtype)) for inputs, each in pairs),
        start=jnp.float32(0),
    )


def scores(
    hidden: Float[Array, "B E"], values: Num[Array, "V E"], splits: int
) -> Float[Array, "B V"]:
    """Inner products with the values, without the scales."""
    return dot("be,ve->bv", hidden, values.astype(hidden.dtype))


def plain_scores(hidden: Float[Array, "B E"], table: Float[Array, "V E"]) -> Float[Array, "B V"]:
    """`hidden @ table.T`."""
    return matmul(hidden, table.T)
