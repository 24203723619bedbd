"""Quantised matrices on CPUs in the packed form of few bits, single or in stacks of layers (`kernels/native`)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from orca_jax.kernels.matmul import Quantised
from orca_jax.kernels.native import (
    INPUTS,
    LayerRows,
    Library,
    Packed,
    PackedBits,
    bits_in_stack,
    bits_of_experts,
    can_pack_bits,
    few_bits_products,
    pack_bits,
    part_inputs,
    unpack_columns,
)
from orca_jax.model.packed.matrices import (
    PackedLayout,
    PackedMatrix,
    layout_of,
    on_shards,
    transposed,
)
from orca_jax.model.quantise import QuantisedExperts, QuantisedMatrix, QuantisedTable, few_bits
from orca_jax.model.sharding import MESH_AXES, partition_spec


class BitsParam(nnx.Param[Any]):
    """An array of a `PackedBitsMatrix`. In a layer of a stack, the value is a `kernels.native.Packed`."""


def layer_of(variable: nnx.Variable[Any], place: LayerRows) -> nnx.Variable[Any]:
    """The parameter of one layer. A packed matrix stays in its stack, which the library reads; others are copied."""
    stack = variable.get_value()
    if isinstance(variable, PackedMatrix | BitsParam):
        return variable.replace(Packed(stack, place))
    return variable.replace(jax.lax.dynamic_index_in_dim(stack, place.layer, keepdims=False))


class PackedBitsMatrix(nnx.Module):
    """A quantised matrix in the place of a parameter, or a stack of them, in the form of `kernels.native.pack_bits`.

    Args:
        packed: its arrays, or their sharded shapes; those of a stack have the layers as their first axis.
        layout: the place of the matrix.
        dtype: float32 for products in float32, int8 for activations of 8 bits, another type for those of 16 bits.
    """

    def __init__(self, packed: PackedBits, layout: PackedLayout, dtype: jnp.dtype) -> None:
        words, scales = _bits_axes(layout, packed.scales.shape[-2])
        self.words = BitsParam(packed.words, axes=words, layout=layout)
        self.scales = BitsParam(packed.scales, axes=scales)
        others = (
            None if array is None else BitsParam(array, axes=scales)
            for array in (packed.minima, packed.units)
        )
        self.minima, self.units = map(nnx.data, others)
        order = packed.order
        if order is not None:
            order = BitsParam(order, axes=(*layout.axes[:-2], "groups"))
        self.order = nnx.data(order)
        self.bits = packed.bits
        self.dtype = dtype

    @property
    def layout(self) -> PackedLayout:
        """The place of the matrix."""
        layout: PackedLayout = self.words.get_metadata("layout")
        return layout

    @property
    def packed(self) -> PackedBits:
        """The arrays of the matrix, or of the current layer in its stack."""
        held: dict[str, BitsParam | None] = {
            "words": self.words,
            "scales": self.scales,
            "minima": self.minima,
            "units": self.units,
            "order": self.order,
        }
        values = {name: each.get_value() for name, each in held.items() if each is not None}
        if isinstance(values["words"], Packed):
            stacks = {name: each.stack for name, each in values.items()}
            return PackedBits(**stacks, bits=self.bits, place=values["words"].place)
        return PackedBits(**values, bits=self.bits)


class MixedBitsMatrix(nnx.Module):
    """The matrices of a stack of layers that have several forms.

    Args:
        forms: the stack of each form.
        form_of: the form of each layer.
    """

    def __init__(self, forms: Sequence[PackedBitsMatrix], form_of: Sequence[int]) -> None:
        self.forms = nnx.List(forms)
        self.form_of = tuple(form_of)

    def packed_as(self, form: int) -> PackedBits:
        """The arrays of the current layer, which has this form."""
        packed: PackedBits = self.forms[form].packed
        places = np.cumsum(np.equal(self.form_of, form)) - 1
        return replace(
            packed, place=packed.place._replace(layer=jnp.asarray(places)[packed.place.layer])
        )


def num_rows(held: BitsParam | PackedMatrix | PackedBitsMatrix | MixedBitsMatrix) -> Array | None:
    """The number of the first rows of x that a matrix in a stack of layers multiplies; None if it is in no stack."""
    if isinstance(held, MixedBitsMatrix):
        return num_rows(held.forms[0])
    if isinstance(held, PackedBitsMatrix):
        return num_rows(held.words)
    value = held.get_value()
    if not isinstance(value, Packed):
        return None
    return value.place.rows


def bits_matmuls(
    x: Float[Array, "T I"],
    matrices: Sequence[PackedBitsMatrix | MixedBitsMatrix],
    sizes: Int[Array, "X"] | None = None,
) -> list[Float[Array, "T O"]]:
    """`x` times each of some matrices with the same inputs, with float32 sums over groups of them.

    `sizes` as for `packed_matmuls`.
    """
    mixed = [matrix for matrix in matrices if isinstance(matrix, MixedBitsMatrix)]
    by_layer = list(zip(*[matrix.form_of for matrix in mixed], strict=True)) or [()]
    choices = list(dict.fromkeys(by_layer))
    branches = [partial(_products_in_forms, matrices, choice, sizes) for choice in choices]
    if len(branches) == 1:
        return branches[0](x)
    numbers = jnp.asarray([choices.index(choice) for choice in by_layer])
    products: list[Array] = jax.lax.switch(
        numbers[mixed[0].forms[0].packed.place.layer], branches, x
    )
    return products


def _products_in_forms(
    matrices: Sequence[PackedBitsMatrix | MixedBitsMatrix],
    forms: tuple[int, ...],
    sizes: Int[Array, "X"] | None,
    x: Float[Array, "T I"],
) -> list[Float[Array, "T O"]]:
    """`bits_matmuls` in a layer whose mixed matrices have these forms."""
    left = iter(forms)
    plain: list[PackedBitsMatrix] = []
    packed: list[PackedBits] = []
    for each in matrices:
        if isinstance(each, MixedBitsMatrix):
            plain.append(each.forms[0])
            packed.append(each.packed_as(next(left)))
        else:
            plain.append(each)
            packed.append(each.packed)
    if sizes is not None:
        packed = [bits_of_experts(each, sizes) for each in packed]
    return _products(plain, packed, x)


def _products(
    matrices: Sequence[PackedBitsMatrix], packed: Sequence[PackedBits], x: Float[Array, "T I"]
) -> list[Float[Array, "T O"]]:
    """`x` times each of some matrices with these arrays."""
    layouts = [matrix.layout for matrix in matrices]
    specs = [_bits_specs(*pair) for pair in zip(layouts, packed, strict=True)]
    multiply = partial(few_bits_products, dtype=matrices[0].dtype, devices=layouts[0].num_devices)
    return on_shards(multiply, x, layouts, list(packed), specs)


class PackedBitsTable(PackedBitsMatrix):
    """A quantised table [V, E], as a matrix from E to V."""

    @property
    def num_rows(self) -> int:
        """Number of rows, with those of padding."""
        blocks, _, width = self.words.get_value().shape
        return int(blocks * width)

    def rows(self, index: Int[Array, "T"]) -> Float[Array, "T E"]:
        """The rows `index`; one out of range gets the nearest row."""
        return unpack_columns(self.packed, jnp.clip(index, 0, self.num_rows - 1))

    def scores(
        self, hidden: Float[Array, "B E"], count: Int[Array, ""] | None = None
    ) -> Float[Array, "B V"]:
        """Inner product of every hidden vector, or of the first `count`, with every row."""
        packed = bits_in_stack(self.packed, len(hidden) if count is None else count)
        return _products([self], [packed], hidden)[0]


def packed_bits[Held: QuantisedMatrix | QuantisedExperts](
    held: Held, library: Library, num_devices: int
) -> Held | PackedBitsMatrix:
    """The packed form of a quantised matrix or of those of all experts, or `held` itself if its shape or kind has none.

    Args:
        held: matrices of a single layer, arrays or sharded shapes with logical axes.
        library: the library of the product.
        num_devices: the devices that share the processors of this machine.
    """
    layout = layout_of(held.values, library, num_devices)
    packed = _packed_bits(held.values, held.scale, held.kind, layout, library)
    if packed is None:
        return held
    return PackedBitsMatrix(packed, layout, _form(held.dtype, library))


def has_packed_bits(held: QuantisedExperts, library: Library) -> bool:
    """True if `packed_bits` returns a packed form."""
    stored = Quantised(held.values.get_value(), held.scale.get_value())
    return _can_pack(stored, held.kind, layout_of(held.values, library, 1), library)


def packed_bits_table(
    held: QuantisedTable, library: Library, num_devices: int
) -> QuantisedTable | PackedBitsTable:
    """The packed form of a quantised table, or `held` itself if its shape has none; see `packed_bits`."""
    layout = transposed(layout_of(held.values, library, num_devices))
    packed = _packed_bits(held.values, held.scale, "table", layout, library)
    if packed is None:
        return held
    return PackedBitsTable(packed, layout, _form(held.dtype, library))


def _form(dtype: jnp.dtype, library: Library) -> jnp.dtype:
    """The type that stands for the form of products with few bits beside weights of a type."""
    return {0: dtype, 8: jnp.dtype(jnp.int8), 16: jnp.dtype(jnp.bfloat16)}[library.activation_bits]


def _packed_bits(
    values: nnx.Param[Any], scale: nnx.Param[Any], form: str, layout: PackedLayout, library: Library
) -> PackedBits | None:
    """The packed form of stored values and scales, or its shapes; None if there is none."""
    stored = Quantised(values.get_value(), scale.get_value())
    if not _can_pack(stored, form, layout, library):
        return None
    splits = _splits(layout)[0]
    shapes = jax.eval_shape(
        partial(_pack_stored, form=form, width=layout.width, splits=splits), stored
    )
    shardings = _bits_shardings(layout, shapes)
    if isinstance(stored.values, jax.ShapeDtypeStruct):
        return _sharded(shapes, shardings)
    packed: PackedBits = _packing_bits(form, layout.width, splits, shardings)(stored)
    return jax.block_until_ready(packed)


class BitsForm(NamedTuple):
    """The form of a matrix in files: its bits, and the inputs of a group.

    `unit` is the number of groups whose scales and minima are integers times units; without them, 0, these are float16,
    or float32 if they are wide. With an order, the rows of a matrix are not in the order of the inputs.
    """

    bits: int
    group: int = 32
    has_minima: bool = False
    unit: int = 0
    is_wide: bool = False
    has_order: bool = False


def stored_bits(
    plain: nnx.Param[Any], library: Library, num_devices: int, forms: Sequence[BitsForm]
) -> PackedBitsMatrix | MixedBitsMatrix | None:
    """The shapes of a matrix or table that files have in few bits; None if it has no packed form.

    Args:
        plain: its sharded shape, with logical axes.
        library: the library of the product.
        num_devices: the devices that share the processors of this machine.
        forms: that of the files; in a stack, that of each layer, or of each expert of each layer. The experts of a
            layer have the same form.
    """
    layout = layout_of(plain, library, num_devices)
    value = plain.get_value()
    *stack, inputs, outputs = value.shape
    kind = PackedBitsMatrix
    if plain.get_metadata("axes")[0] == "vocab":
        kind = PackedBitsTable
        layout = transposed(layout)
        inputs, outputs = outputs, inputs
    experts = 1
    if "experts" in layout.axes:
        experts = stack[-1]
    forms = forms[::experts]
    held = list[PackedBitsMatrix]()
    kinds = list(dict.fromkeys(forms))
    for form in kinds:
        shapes = _stored_shapes((inputs, outputs), layout, form)
        if shapes is None:
            return None
        first = [forms.count(form) if axis == "layers" else experts for axis in layout.axes[:-2]]
        shapes = jax.tree.map(partial(_stacked, first), shapes)
        sharded = _sharded(shapes, _bits_shardings(layout, shapes))
        held.append(kind(sharded, layout, _form(value.dtype, library)))
    if len(held) == 1:
        return held[0]
    return MixedBitsMatrix(held, [kinds.index(form) for form in forms])


def _stored_shapes(
    sizes: tuple[int, int], layout: PackedLayout, form: BitsForm
) -> PackedBits | None:
    """The shapes of a matrix with inputs and outputs of these sizes; None if it has no packed form."""
    inputs, outputs = sizes
    bits = form.bits
    group = form.group
    unit = form.unit
    splits, parts = _splits(layout)
    own = inputs // splits
    if own % max(INPUTS, group * unit) or group % part_inputs(bits):
        return None
    if group < inputs and own % group:
        return None
    if outputs // parts % layout.width or (form.has_order and not _can_order(layout, splits)):
        return None

    def shape(rows: int, dtype: Any, kinds: int = 1) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((outputs // layout.width, rows, kinds * layout.width), dtype)

    kind: Any = jnp.int8 if unit else jnp.float16
    if form.is_wide:
        kind = jnp.float32
    factors = shape(inputs // group, kind)
    packed = PackedBits(shape(inputs * bits // 32, jnp.uint32), factors, bits)
    if form.has_minima:
        packed = replace(packed, minima=factors)
    if unit:
        units = shape(inputs // (group * unit), jnp.float16, 1 + form.has_minima)
        packed = replace(packed, units=units)
    if form.has_order:
        packed = replace(packed, order=jax.ShapeDtypeStruct((inputs,), jnp.int32))
    return packed


def _can_order(layout: PackedLayout, splits: int) -> bool:
    """True if a product can arrange its inputs before: none with experts, tables and inputs on several devices."""
    return splits == 1 and not {"experts", "vocab"}.intersection(layout.axes)


def _stacked(first: Sequence[int], shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*first, *shape.shape), shape.dtype)


def _bits_axes(layout: PackedLayout, num_groups: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The logical axes of words and of scales. A single group has the inputs of all devices."""
    *stack, inputs, outputs = layout.axes
    groups = "groups" if num_groups == 1 else inputs
    return (*stack, outputs, inputs, "columns"), (*stack, outputs, groups, "columns")


def _bits_specs(layout: PackedLayout, packed: PackedBits) -> PackedBits:
    words, scales = map(partition_spec, _bits_axes(layout, packed.scales.shape[-2]))
    if packed.words.ndim != len(words):  # a stack of one, or of the experts of all layers
        words = PartitionSpec(None, *words[-3:])
        scales = PartitionSpec(None, *scales[-3:])
    specs: PackedBits = jax.tree.map(lambda _: scales, packed)
    specs = replace(specs, words=words)
    if packed.order is not None:
        specs = replace(specs, order=PartitionSpec())
    if packed.place is not None:
        specs = replace(specs, place=PartitionSpec())
    return specs


def _bits_shardings(layout: PackedLayout, packed: PackedBits) -> PackedBits:
    shardings: PackedBits = jax.tree.map(
        lambda spec: NamedSharding(layout.mesh, spec), _bits_specs(layout, packed)
    )
    return shardings


def _sharded(shapes: PackedBits, shardings: PackedBits) -> PackedBits:
    sharded: PackedBits = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )
    return sharded


def _can_pack(stored: Quantised, form: str, layout: PackedLayout, library: Library) -> bool:
    if form == "fp8":
        return False
    shape = jax.eval_shape(lambda stored: few_bits(_first(stored), form), stored)
    (inputs, outputs), (splits, parts) = shape.values.shape, _splits(layout)
    return can_pack_bits(library, inputs, outputs // parts, shape.scales.shape[0], splits)


def _splits(layout: PackedLayout) -> tuple[int, int]:
    """The devices over which inputs and outputs are split."""
    inputs, outputs = (MESH_AXES[axis] is not None for axis in layout.axes[-2:])
    return layout.mesh.size**inputs, layout.mesh.size**outputs


def _first(stored: Quantised) -> Quantised:
    """The values and scales of a matrix, or of the first one of stacks."""
    if stored.values.ndim == 2:
        return stored
    return _first(Quantised(stored.values[0], stored.scale[0]))


def _pack_stored(stored: Quantised, form: str, width: int, splits: int) -> PackedBits:
    if stored.values.ndim > 2:  # experts, one by one: the temporary memory is that of one
        packed: PackedBits = jax.lax.map(
            partial(_pack_stored, form=form, width=width, splits=splits), stored
        )
        return packed
    return pack_bits(few_bits(stored, form), width, splits)


@cache
def _packing_bits(
    form: str, width: int, splits: int, shardings: PackedBits
) -> Callable[[Quantised], PackedBits]:
    return jax.jit(
        partial(_pack_stored, form=form, width=width, splits=splits), out_shardings=shardings
    )
