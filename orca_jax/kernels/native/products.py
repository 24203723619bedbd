"""Products for CPUs: the form of a packed matrix, and the products of the library (`product.c`)."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from orca_jax.kernels.native.compiler import PACKED_PRODUCTS
from orca_jax.kernels.native.library import Library


def has_products(dtype: jnp.dtype) -> bool:
    """True if the library multiplies matrices of this type."""
    return dtype in (jnp.float32, jnp.bfloat16)


def can_pack(library: Library, inputs: int, outputs: int, dtype: jnp.dtype) -> bool:
    """True if a matrix of this shape, as one device holds it, has whole blocks."""
    return has_products(dtype) and inputs % inputs_each(dtype) == 0 and outputs % library.width == 0


def pack(matrix: Float[Array, "*L I O"], width: int) -> Float[Array, "*L N J W"]:
    """Arrange a matrix, or each of a stack, in blocks of columns. Zeros fill the last ones.

    Args:
        matrix: a matrix in float32 or bfloat16.
        width: columns of a block, W or W / 2.

    Returns:
        float32 `[O / width, I, width]`, or bfloat16 `[O / width, I / 2, 2 * width]`: inputs 2i and 2i + 1 of a column
        are neighbours.
    """
    missing = _missing(matrix, width)
    if missing:
        matrix = jnp.pad(matrix, missing)
    return _blocks(matrix, width)


def pack_by_numpy(matrix: Float[np.ndarray, "*L I O"], width: int) -> Float[np.ndarray, "*L N J W"]:
    """The same as `pack` without a program that XLA compiles."""
    missing = _missing(matrix, width)
    if missing:
        matrix = np.pad(matrix, missing)
    return _blocks(matrix, width)


def _missing(matrix: Array | np.ndarray, width: int) -> list[tuple[int, int]]:
    """The padding of each axis that fills the last inputs and the last block; empty if they are full."""
    *stack, inputs, outputs = matrix.shape
    ends = -inputs % inputs_each(matrix.dtype), -outputs % width
    if not any(ends):
        return []
    return [(0, 0)] * len(stack) + [(0, end) for end in ends]


def _blocks[T: (Array, np.ndarray)](matrix: T, width: int) -> T:
    each = inputs_each(matrix.dtype)
    *stack, inputs, outputs = matrix.shape
    parts = matrix.reshape(-1, inputs // each, each, outputs // width, width).transpose(
        0, 3, 1, 4, 2
    )
    return parts.reshape(*stack, outputs // width, inputs // each, width * each)


class LayerRows(NamedTuple):
    """A matrix of a stack, and the number of the first rows of x that it multiplies.

    With X numbers of rows, X matrices from this one on multiply as many rows each, one after the other. The results of
    other rows are undefined.
    """

    layer: Int[Array, ""]
    rows: Int[Array, ""] | Int[Array, "X"]

    @property
    def operand(self) -> Int[Array, "Y"]:
        """The argument of the library."""
        return jnp.concatenate([jnp.atleast_1d(jnp.asarray(value, jnp.int32)) for value in self])


def first_layer(num_rows: int | Int[Array, ""]) -> LayerRows:
    """The only matrix of a stack, and so many rows."""
    return LayerRows(jnp.int32(0), jnp.int32(num_rows))


class Packed(NamedTuple):
    """One matrix of a stack from `pack`, or those of the experts of a layer. The library reads them in place."""

    stack: Float[Array, "*L N J W"]
    place: LayerRows


def in_stack(packed: Float[Array, "N J W"] | Packed, num_rows: int | Int[Array, ""]) -> Packed:
    """The matrix in its stack; one alone is a stack of one, and multiplies `num_rows` rows."""
    if isinstance(packed, Packed):
        return packed
    return Packed(packed[None], first_layer(num_rows))


def of_experts(packed: Float[Array, "X N J W"] | Packed, sizes: Int[Array, "X"]) -> Packed:
    """The matrices of the experts of a layer, for so many rows each, one after the other."""
    stack, place = packed if isinstance(packed, Packed) else (packed, first_layer(0))
    return Packed(stack.reshape(-1, *stack.shape[-3:]), LayerRows(place.layer * len(sizes), sizes))


def packed_product(
    x: Float[Array, "T I"], packed: Float[Array, "N J W"] | Packed, devices: int = 1
) -> Float[Array, "T O"]:
    """`x @ matrix` on one device; see `packed_products`."""
    return packed_products(x, [in_stack(packed, len(x))], devices)[0]


def packed_products(
    x: Float[Array, "T I"], matrices: Sequence[Packed], devices: int = 1
) -> list[Float[Array, "T O"]]:
    """`x` times each of some matrices of one type on one device, with float32 sums.

    A row's results do not depend on the other rows.

    Args:
        x: converted to the type of the matrices.
        matrices: packed ones, in one call of the library.
        devices: those that share the processors of this machine.
    """
    dtype = matrices[0].stack.dtype
    shapes = [
        (x.shape[0], each.stack.shape[1] * each.stack.shape[3] // inputs_each(dtype))
        for each in matrices
    ]
    call = jax.ffi.ffi_call(
        PACKED_PRODUCTS, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    )
    pairs: list[Array] = []
    for each in matrices:
        pairs += [each.stack, each.place.operand]
    return list(call(x.astype(dtype), *pairs, devices=np.int64(devices)))


def packed_columns(
    packed: Float[Array, "N J W"], columns: Int[Array, "T"], width: int
) -> Float[Array, "T I"]:
    """Some columns of a matrix packed in blocks of `width` columns, in float32."""
    each = inputs_each(packed.dtype)
    blocks = packed.reshape(*packed.shape[:2], width, each)
    return (
        blocks[columns // width, :, columns % width].reshape(len(columns), -1).astype(jnp.float32)
    )


def inputs_each(dtype: jnp.dtype) -> int:
    """Inputs of a matrix in four bytes."""
    return 2 if dtype == jnp.bfloat16 else 1
