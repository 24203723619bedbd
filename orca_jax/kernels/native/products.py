"""Products for CPUs: the form of a packed matrix, and the products of the library (`product.c`)."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from orca_jax.kernels.native.library import PACKED_PRODUCT, TABLE_PRODUCT, Library


def can_pack(library: Library, inputs: int, outputs: int, dtype: jnp.dtype) -> bool:
    """True if a matrix of this shape, as one device holds it, can be packed."""
    return _has_type(library, dtype) and inputs % inputs_each(dtype) == 0 and outputs % library.width == 0


def can_multiply_table(library: Library, rows: int, inputs: int, dtype: jnp.dtype) -> bool:
    """True if `table_product` takes a table of this shape, as one device holds it."""
    words = library.lanes * inputs_each(dtype)
    return _has_type(library, dtype) and inputs % words == 0 and rows % library.table_rows == 0


def pack(matrix: Float[Array, "I O"], width: int) -> Float[Array, "N J W"]:
    """Arrange a matrix in blocks of columns.

    Args:
        matrix: in float32 or bfloat16.
        width: columns of a block, W or W / 2.

    Returns:
        float32 `[O / width, I, width]`, or bfloat16 `[O / width, I / 2, 2 * width]`: inputs 2i and 2i + 1 of a column
        are neighbours.
    """
    inputs, outputs = matrix.shape
    each = inputs_each(matrix.dtype)
    blocks = matrix.reshape(inputs // each, each, outputs // width, width).transpose(2, 0, 3, 1)
    return blocks.reshape(outputs // width, inputs // each, width * each)


def packed_product(x: Float[Array, "T I"], packed: Float[Array, "N J W"], devices: int = 1) -> Float[Array, "T O"]:
    """`x @ matrix` on one device, with float32 sums. A row's result does not depend on the other rows.

    Args:
        x: converted to the type of the matrix.
        packed: the matrix, from `pack`.
        devices: those that share the processors of this machine.
    """
    blocks, _, size = packed.shape
    return _call(PACKED_PRODUCT, x, packed, blocks * size // inputs_each(packed.dtype), devices)


def table_product(x: Float[Array, "T I"], table: Float[Array, "O I"], devices: int = 1) -> Float[Array, "T O"]:
    """`x @ table.T` on one device, with float32 sums. A row's result does not depend on the other rows.

    The arguments are those of `packed_product`, with a plain table.
    """
    return _call(TABLE_PRODUCT, x, table, table.shape[0], devices)


def inputs_each(dtype: jnp.dtype) -> int:
    """Inputs of a matrix in four bytes."""
    return 2 if dtype == jnp.bfloat16 else 1


def _call(target: str, x: Array, matrix: Array, outputs: int, devices: int) -> Array:
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32))
    out: jax.Array = call(x.astype(matrix.dtype), matrix, devices=np.int64(devices))
    return out


def _has_type(library: Library, dtype: jnp.dtype) -> bool:
    return dtype == jnp.float32 or (dtype == jnp.bfloat16 and library.has_bfloat16)
