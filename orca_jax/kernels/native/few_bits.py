"""The packed form of matrices of integers in 4 to 8 bits with scales, and their products by the library."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from orca_jax.kernels.native.compiler import FEW_BITS_PRODUCTS
from orca_jax.kernels.native.integers import FewBits
from orca_jax.kernels.native.library import Library
from orca_jax.kernels.native.products import LayerRows, first_layer

INPUTS = 32
"""Inputs of a row that have one scale in the form with 16 bits; packed groups are multiples of it."""

MOST_INPUTS = 128
"""Most inputs in a packed group, unless it has all inputs."""

_FORMS = {"float32": 1, "int8": 2}  # others are 0
_FORMS_OF_FLOATS = {"float32": 4}  # others are 3
_ARRAYS = ("words", "scales", "minima", "units")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(*_ARRAYS, "order", "place"),
    meta_fields=("bits", "is_float"),
)
@dataclass(frozen=True)
class PackedBits:
    """A `FewBits` in the order in which the library reads it: N blocks of W columns.

    A word has some inputs of a column, as numbers from 0; `shifts` gives the place of each. With 5 and 6 bits, words
    with the low 4 bits of 32 and 16 inputs come before one with the high bits of all of them. Units are factors of
    scales and minima, which are integers then: each is that of some groups.

    If they are floats, numbers of 8 bits are those of e4m3 bit by bit, without minima. NaN is not among them.

    With `place`, the arrays have one more axis, the first, and the matrix is this one of a stack. The library reads it
    in place.
    """

    words: Any  # uint32 [N, J, W]. Each of these may be a shape or a sharding
    scales: Any  # float32, float16 or int8 [N, G, W]
    bits: int
    minima: Any = None  # of the type of the scales [N, G, W]
    units: Any = None  # float16 [N, H, W], or with minima [N, H, 2 W]: theirs come last
    order: Any = None  # int [I]; in a stack [L, I]
    place: Any = None  # LayerRows
    is_float: bool = False


def can_pack_bits(
    library: Library, inputs: int, outputs: int, num_groups: int, splits: int = 1
) -> bool:
    """True if `pack_bits` takes a matrix.

    Args:
        library: the library of the products.
        inputs: of the whole matrix, I.
        outputs: on one device.
        num_groups: G.
        splits: devices over which the inputs are split.
    """
    own = inputs // splits
    return (
        outputs % library.width == 0
        and own % INPUTS == 0
        and _group(own, inputs // num_groups) % INPUTS == 0
    )


def pack_bits(matrix: FewBits, width: int, splits: int = 1) -> PackedBits:
    """Arrange a matrix in blocks of `width` columns.

    If the inputs are split over `splits` devices, no group reaches over the edge of one. A single group has the inputs
    of all devices.
    """
    inputs, outputs = matrix.values.shape
    if matrix.is_float:
        numbers = jax.lax.bitcast_convert_type(matrix.values, jnp.uint8).astype(jnp.uint32)
    else:
        numbers = (matrix.values.astype(jnp.int32) + _least(matrix)).astype(jnp.uint32)

    def placed(numbers: Array, bits: int) -> Array:
        words = numbers.reshape(-1, 32 // bits, outputs) << shifts(bits)[:, None]
        return words.sum(axis=1, dtype=jnp.uint32)

    low = low_bits(matrix.bits)
    words = placed(numbers & ((1 << low) - 1), low)
    if matrix.bits > low:
        both = (words, placed(numbers >> low, matrix.bits - low))
        parts = inputs // part_inputs(matrix.bits)
        words = jnp.concatenate(
            [each.reshape(parts, -1, outputs) for each in both], axis=1
        ).reshape(-1, outputs)
    old = inputs // matrix.scales.shape[0]
    repeats = 1
    if old < inputs:
        repeats = old // _group(inputs // splits, old)

    def blocks(rows: Array) -> Array:
        return rows.reshape(rows.shape[0], -1, width).transpose(1, 0, 2)

    def groups(numbers: Array) -> Array:
        kind = jnp.float16 if numbers.dtype == jnp.float16 else jnp.float32
        return blocks(jnp.repeat(numbers.astype(kind), repeats, axis=0))

    packed = PackedBits(
        blocks(words),
        groups(matrix.scales),
        matrix.bits,
        order=matrix.order,
        is_float=matrix.is_float,
    )
    if matrix.minima is not None:
        packed = replace(packed, minima=groups(matrix.minima))
    return packed


def _least(matrix: "FewBits | PackedBits") -> int:
    """What packed numbers are above the signed ones. With minima both are from 0 on."""
    if matrix.minima is not None:
        return 0
    return 1 << (matrix.bits - 1)


def low_bits(bits: int) -> int:
    """The bits of a number in the first words of a part; others are in the last one."""
    return 8 if bits == 8 else 4


def part_inputs(bits: int) -> int:
    """Inputs of a column whose words are together."""
    return 16 if bits == 6 else 32


def shifts(bits: int) -> np.ndarray:
    """The place of each input of a word: even inputs are in the low half of a word, and odd ones in the high half."""
    place = np.arange(32 // bits, dtype=np.uint32)
    return place % 2 * 16 + place // 2 * bits


def unpack_columns(packed: PackedBits, columns: Int[Array, "T"]) -> Float[Array, "T I"]:
    """Some columns of a matrix in float32."""
    width = packed.words.shape[2]
    bits = packed.bits
    block = columns // width
    lane = columns % width
    low = low_bits(bits)
    size = part_inputs(bits)
    words = packed.words[block, :, lane].reshape(len(columns), -1, size * bits // 32)
    lines = size * low // 32

    def placed(words: Array, bits: int) -> Array:
        numbers = words[..., None] >> shifts(bits) & np.uint32((1 << bits) - 1)
        return numbers.astype(jnp.int32).reshape(len(columns), -1)

    values = placed(words[..., :lines], low)
    if packed.is_float:
        values = _floats(values)
    else:
        if bits > low:
            values |= placed(words[..., lines:], bits - low) << low
        values -= _least(packed)

    def factors(numbers: Array, second: int) -> Array:
        found = numbers[block, :, lane].astype(jnp.float32)
        if packed.units is not None:
            units = packed.units[block, :, lane + second].astype(jnp.float32)
            found *= jnp.repeat(units, found.shape[1] // units.shape[1], axis=1)
        return found[..., None]

    scales = factors(packed.scales, 0)
    entries = values.reshape(len(columns), scales.shape[1], -1).astype(jnp.float32) * scales
    if packed.minima is not None:
        entries -= factors(packed.minima, width)
    return entries.reshape(len(columns), -1)


def _floats(codes: Int[Array, "*any"]) -> Float[Array, "*any"]:
    """The numbers of e4m3 with these bits, in float32."""
    codes = codes.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def few_bits_product(
    x: Float[Array, "T I"], packed: PackedBits, dtype: jnp.dtype, devices: int = 1
) -> Float[Array, "T O"]:
    """`x` times a matrix on one device; see `few_bits_products`."""
    return few_bits_products(x, [packed], dtype, devices)[0]


def few_bits_products(
    x: Float[Array, "T I"], matrices: Sequence[PackedBits], dtype: jnp.dtype, devices: int = 1
) -> list[Float[Array, "T O"]]:
    """`x` times each of some matrices on one device. A row's results do not depend on the other rows, to the bit.

    Args:
        x: activations.
        matrices: of any number of bits, in one call of the library, or one for each if some have an order, or some are
            floats and others integers.
        dtype: float32 for products in float32. In another type x has floats of 16 bits for floats. For integers each
            `INPUTS` inputs of a row become integers with a scale, of 8 bits for int8, else of 16. Their products are
            summed exactly in groups of them, and then in float32.
        devices: those that share the processors of this machine.
    """
    for each in matrices:
        has_all = each.words.shape[-2] * 32 == x.shape[1] * each.bits
        assert has_all, (
            f"{each.words.shape[-2]} words of a column cannot hold {x.shape[1]} inputs of {each.bits} bits"
        )
    x = x.astype(jnp.float32)
    kinds = {each.is_float for each in matrices}
    if len(kinds) == 1 and all([each.order is None for each in matrices]):
        return _products(x, matrices, dtype, devices)
    found = []
    for each in matrices:
        found += _products(_ordered(x, each), [each], dtype, devices)
    return found


def _ordered(x: Array, matrix: PackedBits) -> Array:
    """The inputs in the order of a matrix, or of its layer in a stack."""
    order = matrix.order
    if order is None:
        return x
    if order.ndim > 1:
        order = order[matrix.place.layer]
    return x[:, order]


def _products(
    x: Array, matrices: Sequence[PackedBits], dtype: jnp.dtype, devices: int
) -> list[Array]:
    given: list[Array] = []
    for matrix in matrices:
        given += _arguments(bits_in_stack(matrix, len(x)))
    forms = _FORMS
    usual = 0
    if matrices[0].is_float:
        forms = _FORMS_OF_FLOATS
        usual = 3
    shapes = [(x.shape[0], m.words.shape[-3] * m.words.shape[-1]) for m in matrices]
    call = jax.ffi.ffi_call(
        FEW_BITS_PRODUCTS, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    )
    return list(
        call(
            x,
            *given,
            devices=np.int64(devices),
            form=np.int64(forms.get(jnp.dtype(dtype).name, usual)),
        )
    )


def bits_in_stack(matrix: PackedBits, num_rows: int | Int[Array, ""]) -> PackedBits:
    """The matrix in its stack; one alone is a stack of one, and multiplies `num_rows` rows."""
    if matrix.place is None:
        return _placed(matrix, lambda array: array[None], first_layer(num_rows))
    return matrix


def bits_of_experts(matrix: PackedBits, sizes: Int[Array, "X"]) -> PackedBits:
    """The matrices of the experts of a layer, for so many rows each, one after the other."""
    place = matrix.place or first_layer(0)
    own = LayerRows(place.layer * len(sizes), sizes)
    return _placed(matrix, lambda array: array.reshape(-1, *array.shape[-3:]), own)


def _placed(matrix: PackedBits, change: Callable[[Array], Array], place: LayerRows) -> PackedBits:
    arrays = {name: getattr(matrix, name) for name in _ARRAYS}
    stacks: dict[str, Any] = jax.tree.map(change, arrays)  # those that are there
    return replace(matrix, **stacks, place=place)


def _arguments(matrix: PackedBits) -> list[Array]:
    none = jnp.zeros((0, 0, 0, 0), jnp.float32)
    arrays = [getattr(matrix, name) for name in _ARRAYS]
    return [*(none if array is None else array for array in arrays), matrix.place.operand]


def _group(inputs: int, size: int) -> int:
    """Inputs in a packed group, of so many on a device; `size` is that before packing."""
    if size <= MOST_INPUTS or size % inputs == 0:
        return math.gcd(inputs, size)
    return math.gcd(inputs, size, MOST_INPUTS)
