"""Products for CPUs: the form of a packed matrix, and the products of the library (`product.c`)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from orca_jax.kernels.native.library import PACKED_PRODUCT, TABLE_PRODUCT, Library


def can_pack(library: Library, inputs: int, outputs: int, dtype: jnp.dtype) -> bool:
    """True if a matrix of this shape, as one device holds it, can be packed."""
    return _has_type(library, dtype) and inputs % inputs_each(dtype) == 0 and outputs % library.width == 0


def can_multiply_table(library: Library, rows: int, inputs: int, dtype: jnp.dtype) -> bool:
    """True if `table_product` takes a table of this shape, as one device holds it."""
    words = library.lanes * inputs_each(dtype)
    return _has_type(library, dtype) and inputs % words == 0 and rows % library.table_rows == 0


def pack(matrix: Float[Array, "*L I O"], width: int) -> Float[Array, "*L N J W"]:
    """Arrange a matrix, or each of a stack, in blocks of columns.

    Args:
        matrix: a matrix in float32 or bfloat16.
        width: columns of a block, W or W / 2.

    Returns:
        float32 `[O / width, I, width]`, or bfloat16 `[O / width, I / 2, 2 * width]`: inputs 2i and 2i + 1 of a column
        are neighbours.
    """
    *stack, inputs, outputs = matrix.shape
    each = inputs_each(matrix.dtype)
    parts = matrix.reshape(-1, inputs // each, each, outputs // width, width).transpose(0, 3, 1, 4, 2)
    return parts.reshape(*stack, outputs // width, inputs // each, width * each)


class Packed(NamedTuple):
    """One matrix of a stack from `pack`. The library reads it in place."""

    stack: Float[Array, "L N J W"]
    layer: Int[Array, ""]


def in_stack(packed: Float[Array, "N J W"] | Packed) -> Packed:
    """The matrix in its stack; one alone is a stack of one."""
    return packed if isinstance(packed, Packed) else Packed(packed[None], jnp.int32(0))


def packed_product(
    x: Float[Array, "T I"], packed: Float[Array, "N J W"] | Packed, devices: int = 1
) -> Float[Array, "T O"]:
    """`x @ matrix` on one device, with float32 sums. A row's result does not depend on the other rows.

    Args:
        x: converted to the type of the matrix.
        packed: the matrix, from `pack`, or one of a stack.
        devices: those that share the processors of this machine.
    """
    stack, layer = in_stack(packed)
    _, blocks, _, size = stack.shape
    return _call(PACKED_PRODUCT, x, stack, blocks * size // inputs_each(stack.dtype), devices, layer.astype(jnp.int32))


def table_product(x: Float[Array, "T I"], table: Float[Array, "O I"], devices: int = 1) -> Float[Array, "T O"]:
    """`x @ table.T` on one device, with float32 sums. A row's result does not depend on the other rows.

    The arguments are those of `packed_product`, with a plain table.
    """
    return _call(TABLE_PRODUCT, x, table, table.shape[0], devices)


def inputs_each(dtype: jnp.dtype) -> int:
    """Inputs of a matrix in four bytes."""
    return 2 if dtype == jnp.bfloat16 else 1


def _call(target: str, x: Array, matrix: Array, outputs: int, devices: int, *layer: Array) -> Array:
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32))
    out: jax.Array = call(x.astype(matrix.dtype), matrix, *layer, devices=np.int64(devices))
    return out


def _has_type(library: Library, dtype: jnp.dtype) -> bool:
    return dtype == jnp.float32 or (dtype == jnp.bfloat16 and library.has_bfloat16)
