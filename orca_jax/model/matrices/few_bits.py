"""Quantised matrices on CPUs in the packed form of few bits, single or in stacks of layers (`kernels/native`)."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.kernels.expert_mlp import KernelForm
from orca_jax.kernels.matmul import MatrixKind, Quantised
from orca_jax.kernels.native import (
    Library,
    PackedBits,
    bits_in_stack,
    bits_of_experts,
    can_pack_bits,
    few_bits_products,
    pack_bits,
    unpack_columns,
)
from orca_jax.model.matrices.bits_shapes import (
    BitsForm,
    bits_axes,
    bits_shardings,
    bits_specs,
    placed_shapes,
    splits_of,
    stacked,
    stored_shapes,
)
from orca_jax.model.matrices.layout import (
    PackedLayout,
    StackParam,
    layout_of,
    on_shards,
    transposed,
)
from orca_jax.model.matrices.packed import grouped_form
from orca_jax.model.matrices.quantise import few_bits


class BitsMatrix(nnx.Module):
    """Matrices of few bits: a single one, or a stack of layers with one or several forms of numbers.

    Attributes:
        form_of: the form of each layer, if layers have several; else empty.
    """

    is_plain = False
    products_of = "few bits"
    form_of: tuple[int, ...] = ()

    @property
    @abstractmethod
    def of_a_layer(self) -> "PackedBitsMatrix":
        """A matrix with the place of this one in its stack."""

    @abstractmethod
    def arrays(self, forms: Iterator[int]) -> PackedBits:
        """The arrays of the current layer. `forms` gives the form of each matrix whose layers have several."""

    def products(
        self,
        x: Float[Array, "T I"],
        matrices: "Sequence[BitsMatrix]",
        sizes: Int[Array, "X"] | None = None,
    ) -> list[Float[Array, "T O"]]:
        """`x` times each of some matrices in one call of the library, with float32 sums over groups of inputs."""
        mixed = [matrix for matrix in matrices if matrix.form_of]
        by_layer = list(zip(*[matrix.form_of for matrix in mixed], strict=True)) or [()]
        choices = list(dict.fromkeys(by_layer))
        branches = [partial(_products_in_forms, matrices, choice, sizes) for choice in choices]
        if len(branches) == 1:
            return branches[0](x)
        numbers = jnp.asarray([choices.index(choice) for choice in by_layer])
        place = mixed[0].of_a_layer.words.place
        assert place is not None, "layers with several forms are in stacks"
        products: list[Array] = jax.lax.switch(numbers[place.layer], branches, x)
        return products

    def packed(self, library: Library, num_devices: int) -> "BitsMatrix":
        """Return this matrix: it is packed already."""
        return self

    def has_packed_form(self, library: Library) -> bool:
        """True: it is packed."""
        return True

    def expert_form(self, count: int) -> KernelForm:
        """Products of the library, for all experts in one call."""
        return grouped_form(count, self.of_a_layer.words.num_counted)

    @property
    def operand(self) -> "BitsMatrix":
        """Return this matrix: the library reads its arrays."""
        return self


class PackedBitsMatrix(BitsMatrix):
    """A quantised matrix in the place of a parameter, or a stack of them, in the form of `kernels.native.pack_bits`.

    Args:
        packed: its arrays, or their sharded shapes; the first axis of a stack is the layer.
        layout: the place of the matrix.
        dtype: float32 for products in float32, int8 for activations of 8 bits, another type for 16 bits.
    """

    def __init__(self, packed: PackedBits, layout: PackedLayout, dtype: jnp.dtype) -> None:
        words, scales = bits_axes(layout, packed.scales.shape[-2])
        self.words = StackParam(packed.words, axes=words, layout=layout)
        self.scales = StackParam(packed.scales, axes=scales)
        others = (
            None if array is None else StackParam(array, axes=scales)
            for array in (packed.minima, packed.units)
        )
        self.minima, self.units = map(nnx.data, others)
        order = packed.order
        if order is not None:
            order = StackParam(order, axes=(*layout.axes[:-2], "groups"))
        self.order = nnx.data(order)
        self.bits = packed.bits
        self.is_float = packed.is_float
        self.dtype = dtype

    @property
    def layout(self) -> PackedLayout:
        """The place of the matrix."""
        layout: PackedLayout = self.words.get_metadata("layout")
        return layout

    @property
    def packed_arrays(self) -> PackedBits:
        """The arrays of the matrix, or of the current layer in its stack."""
        held: dict[str, StackParam | None] = {
            "words": self.words,
            "scales": self.scales,
            "minima": self.minima,
            "units": self.units,
            "order": self.order,
        }
        values = {name: each.get_value() for name, each in held.items() if each is not None}
        place = self.words.place
        if place is not None:
            values = {name: each.stack for name, each in values.items()}
        return PackedBits(**values, bits=self.bits, place=place, is_float=self.is_float)

    @property
    def of_a_layer(self) -> "PackedBitsMatrix":
        """A matrix with the place of this one in its stack."""
        return self

    def arrays(self, forms: Iterator[int]) -> PackedBits:
        """The arrays of the current layer. `forms` gives the form of each matrix whose layers have several."""
        return self.packed_arrays


class MixedBitsMatrix(BitsMatrix):
    """The matrices of a stack of layers that have several forms.

    Args:
        forms: the stack of each form.
        form_of: the form of each layer.
    """

    def __init__(self, forms: Sequence[PackedBitsMatrix], form_of: Sequence[int]) -> None:
        self.forms = nnx.List(forms)
        self.form_of = tuple(form_of)

    @property
    def of_a_layer(self) -> PackedBitsMatrix:
        """The matrices of the first form: all stacks have the same place."""
        first: PackedBitsMatrix = self.forms[0]
        return first

    def arrays(self, forms: Iterator[int]) -> PackedBits:
        """The arrays of the current layer, which has the next of these forms."""
        form = next(forms)
        packed: PackedBits = self.forms[form].packed_arrays
        places = np.cumsum(np.equal(self.form_of, form)) - 1
        return replace(
            packed, place=packed.place._replace(layer=jnp.asarray(places)[packed.place.layer])
        )


def _products_in_forms(
    matrices: Sequence[BitsMatrix],
    forms: tuple[int, ...],
    sizes: Int[Array, "X"] | None,
    x: Float[Array, "T I"],
) -> list[Float[Array, "T O"]]:
    """`BitsMatrix.products` in a layer whose mixed matrices have these forms."""
    left = iter(forms)
    packed = [matrix.arrays(left) for matrix in matrices]
    if sizes is not None:
        packed = [bits_of_experts(each, sizes) for each in packed]
    return _products([matrix.of_a_layer for matrix in matrices], packed, x)


def _products(
    matrices: Sequence[PackedBitsMatrix], packed: Sequence[PackedBits], x: Float[Array, "T I"]
) -> list[Float[Array, "T O"]]:
    """`x` times each of some matrices with these arrays."""
    layouts = [matrix.layout for matrix in matrices]
    specs = [bits_specs(*pair) for pair in zip(layouts, packed, strict=True)]
    multiply = partial(few_bits_products, dtype=matrices[0].dtype, devices=layouts[0].num_devices)
    return on_shards(multiply, x, layouts, list(packed), specs)


class PackedBitsTable(PackedBitsMatrix):
    """A quantised table [V, E], as a matrix from E to V."""

    can_skip = True

    @property
    def num_rows(self) -> int:
        """Number of rows, padding included."""
        blocks, _, width = self.words.get_value().shape
        return int(blocks * width)

    def rows(self, index: Int[Array, "T"]) -> Float[Array, "T E"]:
        """The rows `index`; one out of range gets the nearest row."""
        return unpack_columns(self.packed_arrays, jnp.clip(index, 0, self.num_rows - 1))

    def scores(
        self, hidden: Float[Array, "B E"], count: Int[Array, ""] | None = None
    ) -> Float[Array, "B V"]:
        """Inner product of every hidden vector, or of the first `count`, with every row."""
        packed = bits_in_stack(self.packed_arrays, len(hidden) if count is None else count)
        return _products([self], [packed], hidden)[0]


@runtime_checkable
class ScaledArrays(Protocol):
    """A quantised matrix with its scales, or the matrices of all experts."""

    values: nnx.Param[Any]
    scale: nnx.Param[Any]
    kind: MatrixKind
    dtype: jnp.dtype


@runtime_checkable
class ScaledRows(Protocol):
    """A quantised table with a scale for each row."""

    values: nnx.Param[Any]
    scale: nnx.Param[Any]
    dtype: jnp.dtype


def packed_bits[Held: ScaledArrays](
    held: Held, library: Library, num_devices: int
) -> Held | PackedBitsMatrix:
    """The packed form of a quantised matrix or of all experts, or `held` itself if its shape or kind has none.

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


def has_packed_bits(held: ScaledArrays, library: Library) -> bool:
    """True if `packed_bits` returns a packed form."""
    stored = Quantised(held.values.get_value(), held.scale.get_value())
    return _can_pack(stored, held.kind, layout_of(held.values, library, 1), library)


def packed_bits_table[Held: ScaledRows](
    held: Held, library: Library, num_devices: int
) -> Held | PackedBitsTable:
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
    splits = splits_of(layout)[0]
    shapes = jax.eval_shape(
        partial(_pack_stored, form=form, width=layout.width, splits=splits), stored
    )
    shardings = bits_shardings(layout, shapes)
    if isinstance(stored.values, jax.ShapeDtypeStruct):
        return placed_shapes(shapes, layout)
    packed: PackedBits = _packing_bits(form, layout.width, splits, shardings)(stored)
    return jax.block_until_ready(packed)


def stored_bits(
    plain: nnx.Param[Any], library: Library, num_devices: int, forms: Sequence[BitsForm]
) -> BitsMatrix | None:
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
        shapes = stored_shapes((inputs, outputs), layout, form)
        if shapes is None:
            return None
        first = [forms.count(form) if axis == "layers" else experts for axis in layout.axes[:-2]]
        shapes = jax.tree.map(partial(stacked, first), shapes)
        placed = placed_shapes(shapes, layout)
        held.append(kind(placed, layout, _form(value.dtype, library)))
    if len(held) == 1:
        return held[0]
    return MixedBitsMatrix(held, [kinds.index(form) for form in forms])


def _can_pack(stored: Quantised, form: str, layout: PackedLayout, library: Library) -> bool:
    shape = jax.eval_shape(lambda stored: few_bits(_first(stored), form), stored)
    (inputs, outputs), (splits, parts) = shape.values.shape, splits_of(layout)
    return can_pack_bits(library, inputs, outputs // parts, shape.scales.shape[0], splits)


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
