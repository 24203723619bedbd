"""Products that convert some rows of a stored matrix at a time: for CPUs.

These rows stay in the caches of the processor. XLA would write the converted matrix to memory at every use otherwise,
and take ten times as long for a few tokens.
"""

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from orca_jax.kernels.kv_pages import E4M3_IN_16, bits_in_16
from orca_jax.kernels.matmul.api import dot, precision_of
from orca_jax.kernels.matmul.parts import PER_BYTE, MatrixKind, Quantised, numbers_of

BLOCK = 128  # rows of values that are converted at once


def multiply(
    x: Float[Array, "T I"], weight: Quantised, kind: MatrixKind, splits: int
) -> Float[Array, "T O"]:
    """Convert some rows of the values, multiply, add up, and continue with the next rows."""
    per_row = PER_BYTE[kind]  # inputs in a row of values
    values = weight.values.reshape(splits, -1, weight.values.shape[-1])  # [S, J, O]
    inputs = x.reshape(x.shape[0], splits, -1, per_row).transpose(3, 1, 0, 2)  # [per_row, S, T, J]
    rows = values.shape[1]
    size = min(rows, BLOCK)
    each = size
    if weight.is_grouped:  # rows with one scale: in a block, in a group and on a device
        each = math.gcd(BLOCK, rows, rows * splits // len(weight.scale))
    repeats = rows * splits // each

    def of_rows(factors: Num[Array, "G O"]) -> Num[Array, "S R O"]:
        repeated = jnp.repeat(factors, repeats // len(factors), axis=0)
        return repeated.reshape(splits, -1, repeated.shape[1])

    scale = of_rows(weight.scale) if weight.is_grouped else None
    zero = None if weight.zero is None else of_rows(weight.zero)

    def block(start: Array | int, size: int) -> Float[Array, "S T O"]:
        converted = _on_cpu(lax.dynamic_slice_in_dim(values, start, size, axis=1), kind, x.dtype)
        if scale is not None:

            def of_block(factors: Num[Array, "S R O"]) -> Float[Array, "S J O"]:
                own = lax.dynamic_slice_in_dim(factors, start // each, size // each, axis=1)
                return jnp.repeat(own.astype(jnp.float32), each, axis=1)

            numbers = [lane.astype(jnp.float32) for lane in converted]
            if zero is not None:
                numbers = [lane - of_block(zero) for lane in numbers]
            converted = tuple((lane * of_block(scale)).astype(x.dtype) for lane in numbers)
        pairs = zip(lax.dynamic_slice_in_dim(inputs, start, size, axis=3), converted, strict=True)
        return sum((dot("stj,sjo->sto", *pair) for pair in pairs), start=jnp.float32(0))

    total = jnp.zeros((splits, x.shape[0], values.shape[2]), jnp.float32)
    total = lax.fori_loop(
        0, rows // size, lambda index, total: total + block(index * size, size), total
    )
    if rest := rows % size:
        total += block(rows - rest, rest)
    return total.sum(axis=0) * _after(weight, kind)


def scores(
    hidden: Float[Array, "B E"], values: Num[Array, "V E"], splits: int
) -> Float[Array, "B V"]:
    """`multiply` for a table with rows in whole blocks, without the scales."""
    blocks = values.reshape(splits, -1, BLOCK, values.shape[1])

    def block(index: Array, found: Array) -> Array:
        rows = lax.dynamic_index_in_dim(blocks, index, axis=1, keepdims=False).astype(hidden.dtype)
        products = dot("sre,be->srb", rows, hidden)
        return lax.dynamic_update_index_in_dim(found, products, index, axis=1)

    shape = (*blocks.shape[:3], hidden.shape[0])
    found = lax.fori_loop(0, blocks.shape[1], block, jnp.zeros(shape, jnp.float32))
    return found.reshape(values.shape[0], -1).T


def plain_scores(hidden: Float[Array, "B E"], table: Float[Array, "V E"]) -> Float[Array, "B V"]:
    """`hidden @ table.T`. With the table as second operand, XLA:CPU converts all of it to float32."""
    narrow = hidden.astype(table.dtype)
    last_axes = (((1,), (1,)), ((), ()))
    products = lax.dot_general(
        table, narrow, last_axes, precision=precision_of(table), preferred_element_type=jnp.float32
    )
    return products.T


def _on_cpu(
    values: Num[Array, "*any"], kind: MatrixKind, dtype: jnp.dtype
) -> tuple[Float[Array, "*any"], ...]:
    """The numbers of each lane of stored values, without scales."""
    if kind == "fp8":
        return (bits_in_16(values).astype(dtype),)
    return tuple(lane.astype(dtype) for lane in numbers_of(values, kind))


def _after(weight: Quantised, kind: MatrixKind) -> Array:
    """The factor on the sums over `_on_cpu`."""
    scale: Array = jnp.float32(1) if weight.is_grouped else weight.scale
    if kind == "fp8":
        return scale * E4M3_IN_16
    return scale
