"""Packed matrices of linear layers on CPUs, in the order in which a product reads them (`kernels/native`).

A decoder is packed after it is loaded, matrix by matrix, so the memory has one matrix twice at most. The linear layers
of blocks are packed, the table of the unembedding, and on one device experts (`few_bits.py` has quantised ones).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from orca_jax.kernels.expert_mlp import KernelForm
from orca_jax.kernels.native import (
    Library,
    Packed,
    can_pack,
    has_products,
    in_stack,
    inputs_each,
    of_experts,
    pack,
    pack_by_numpy,
    packed_columns,
    packed_products,
)
from orca_jax.model.matrices.base import Matrix
from orca_jax.model.matrices.layout import (
    PackedLayout,
    StackParam,
    layout_of,
    on_shards,
    transposed,
)


class PackedMatrix(StackParam):
    """A matrix in the form of `kernels.native.pack`, split over devices as the plain matrix was.

    Its metadata are `axes`, the logical axes of layers if it is a stack, of blocks of outputs, of inputs, and of the
    numbers of a block; `layout`; and `sizes`, the inputs and outputs of the plain matrix. One that no devices share may
    have others than whole blocks hold.
    """

    is_plain = False
    products_of = "packed"
    is_table = False

    @property
    def layout(self) -> PackedLayout:
        """The place of the matrix."""
        layout: PackedLayout = self.get_metadata("layout")
        return layout

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs."""
        sizes: tuple[int, int] = self.get_metadata("sizes")
        return sizes

    def products(
        self,
        x: Float[Array, "T I"],
        matrices: "Sequence[PackedMatrix]",
        sizes: Int[Array, "X"] | None = None,
    ) -> list[Float[Array, "T O"]]:
        """`x` times each of some matrices in one call of the library."""
        if sizes is not None:
            packed = [of_experts(matrix.get_value(), sizes) for matrix in matrices]
        else:
            packed = [in_stack(matrix.get_value(), len(x)) for matrix in matrices]
        return _matmuls(x, matrices, packed)

    def packed(self, library: Library, num_devices: int) -> "PackedMatrix":
        """Return this matrix: it is packed already."""
        return self

    def has_packed_form(self, library: Library) -> bool:
        """True: it is packed."""
        return True

    def expert_form(self, count: int) -> KernelForm:
        """Products of the library, for all experts in one call."""
        return grouped_form(count, self.num_counted)

    @property
    def operand(self) -> "PackedMatrix":
        """Return this matrix: the library reads its arrays."""
        return self

    @property
    def plain_shape(self) -> jax.ShapeDtypeStruct:
        """The sharded shape of the plain matrix, or of the stack of them."""
        value = self.get_value()
        shape = (*value.shape[:-3], *self.sizes)
        return jax.ShapeDtypeStruct(shape, value.dtype, sharding=self.layout.plain_sharding)

    def pack(self, plain: Array) -> Array:
        """The packed form of values with `plain_shape`."""
        return _packed(plain, self.layout)

    def pack_on_host(self, plain: Array) -> Array:
        """The same as `pack` by NumPy: each device's part of the packed form is made from its part of `plain`."""
        width = self.layout.width
        shards = []
        for shard in plain.addressable_shards:
            part = np.asarray(shard.data)
            packed = pack_by_numpy(part.T if self.is_table else part, width)
            shards.append(jax.device_put(packed, shard.device))
        shape = self.get_value().shape
        return jax.make_array_from_single_device_arrays(shape, self.layout.sharding, shards)


class PackedTable(PackedMatrix):
    """A table [V, E] in the form of a packed matrix from E to V, as the library reads it for the unembedding."""

    can_skip = True
    is_table = True

    @property
    def num_rows(self) -> int:
        """Number of rows, padding included."""
        return self.sizes[1]

    def rows(self, index: Int[Array, "T"]) -> Float[Array, "T E"]:
        """The rows `index`; one out of range gets the nearest row."""
        index = jnp.clip(index, 0, self.num_rows - 1)
        found = packed_columns(self[...], index, self.layout.width)
        return _columns(found, self.sizes[0])

    def scores(
        self, hidden: Float[Array, "B E"], count: Int[Array, ""] | None = None
    ) -> Float[Array, "B V"]:
        """Inner product of every hidden vector, or of the first `count`, with every row, with float32 sums."""
        packed = in_stack(self.get_value(), len(hidden) if count is None else count)
        return _matmuls(hidden, [self], [packed])[0]

    @property
    def plain_shape(self) -> jax.ShapeDtypeStruct:
        """The sharded shape of the plain table."""
        sharding = transposed(self.layout).plain_sharding
        return jax.ShapeDtypeStruct(self.sizes[::-1], self.get_value().dtype, sharding=sharding)

    def pack(self, plain: Array) -> Array:
        """The packed form of a plain table."""
        return _packing(self.layout.width, self.layout.sharding, is_table=True)(plain)


def has_packed_form(plain: nnx.Param[Any], library: Library) -> bool:
    """True if a matrix, or each of a stack, has a packed form; see `packed_matrix`."""
    value = plain.get_value()
    return _fits(value.shape, layout_of(plain, library, 1), library, value.dtype)


def _fits(shape: tuple[int, ...], layout: PackedLayout, library: Library, dtype: jnp.dtype) -> bool:
    """True if a matrix of this whole shape has a packed form: parts of devices must be whole blocks."""
    *_, inputs, outputs = layout.plain_sharding.shard_shape(shape)
    if (inputs, outputs) == shape[-2:]:
        return has_products(dtype)
    return can_pack(library, inputs, outputs, dtype)


def packed_matrix(plain: nnx.Param[Any], library: Library, num_devices: int) -> nnx.Param[Any]:
    """The packed form of a matrix or of a stack, or `plain` itself if its shape or type has none.

    Args:
        plain: an array or a sharded shape [I, O] or [L, I, O], with logical axes.
        library: the library of the product.
        num_devices: the devices that share the processors of this machine.
    """
    if not has_packed_form(plain, library):
        return plain
    value = plain.get_value()
    layout = layout_of(plain, library, num_devices)
    pack_as = _packed_shape if isinstance(value, jax.ShapeDtypeStruct) else _packed
    sizes = value.shape[-2:]
    return PackedMatrix(pack_as(value, layout), axes=layout.packed_axes, layout=layout, sizes=sizes)


def packed_table(plain: nnx.Param[Any], library: Library, num_devices: int) -> nnx.Param[Any]:
    """The packed form of a table, or `plain` itself if its shape or type has none; see `packed_matrix`."""
    value = plain.get_value()
    layout = transposed(layout_of(plain, library, num_devices))
    sizes = value.shape[::-1]
    if not _fits(sizes, layout, library, value.dtype):
        return plain
    held: Array | jax.ShapeDtypeStruct
    if isinstance(value, jax.ShapeDtypeStruct):
        held = _packed_shape(jax.ShapeDtypeStruct(sizes, value.dtype), layout)
    else:
        held = _packing(layout.width, layout.sharding, is_table=True)(value)
    return PackedTable(held, axes=layout.packed_axes, layout=layout, sizes=sizes)


def plain_shape(variable: nnx.Variable[Any]) -> jax.ShapeDtypeStruct:
    """The sharded shape of a parameter as it is read: that of the plain matrix if it is packed."""
    matrix = _packed_in(variable)
    if matrix is not None:
        return matrix.plain_shape
    shape: jax.ShapeDtypeStruct = variable.get_value()
    return shape


def width_in_file(variable: nnx.Variable[Any], num_columns: int, *, is_transposed: bool) -> int:
    """The columns of a block of a packed parameter, if each column is a row of a matrix in a file; 0 if not.

    Args:
        variable: a parameter.
        num_columns: rows of the matrix in the file.
        is_transposed: the plain parameter is the transposed matrix.
    """
    matrix = _packed_in(variable)
    if matrix is None or is_transposed == matrix.is_table:
        return 0
    width = matrix.layout.width
    value = matrix.get_value()
    whole = (value.shape[-2] * inputs_each(value.dtype), value.shape[-3] * width)
    if whole != matrix.sizes or whole[1] != num_columns:
        return 0
    return width


def held_values(variable: nnx.Variable[Any], read: Array) -> Array:
    """The values of a parameter as the decoder holds them, from those with its `plain_shape`."""
    matrix = _packed_in(variable)
    if matrix is None:
        return read
    return matrix.pack(read)


def values_of_host(variable: nnx.Variable[Any], read: Array) -> Array:
    """The same as `held_values` without a program, which would be compiled while the engine serves."""
    matrix = _packed_in(variable)
    if matrix is None:
        return read
    return matrix.pack_on_host(read)


def _packed_in(variable: nnx.Variable[Any]) -> PackedMatrix | None:
    """The variable if it is a packed matrix: of a tree of parameters, not all are matrices."""
    if isinstance(variable, PackedMatrix):
        return variable
    return None


def grouped_form(count: int, num_rows: Array | None) -> KernelForm:
    """The arithmetic of packed matrices of `count` experts: one call of the library for all of them."""

    def grouped(
        x: Float[Array, "A I"], matrices: list[Matrix], sizes: Int[Array, "X"]
    ) -> list[Float[Array, "A O"]]:
        return matrices[0].products(x, matrices, sizes)

    return KernelForm(grouped=grouped, num_experts=count, num_rows=num_rows)


def _matmuls(
    x: Float[Array, "T I"], matrices: Sequence[PackedMatrix], packed: list[Packed]
) -> list[Float[Array, "T O"]]:
    """`x` times each of some matrices with the same inputs, with float32 sums, in one call of the library.

    Args:
        x: the activations.
        matrices: packed ones.
        packed: their places in stacks.
    """
    layouts = [matrix.layout for matrix in matrices]
    specs = [
        Packed._make((PartitionSpec(None, *layout.sharding.spec[-3:]), PartitionSpec()))
        for layout in layouts
    ]
    multiply_part = partial(_products, devices=layouts[0].num_devices)
    products = on_shards(multiply_part, x, layouts, packed, specs)
    return [_columns(out, matrix.sizes[1]) for out, matrix in zip(products, matrices, strict=True)]


def _columns(values: Float[Array, "T X"], number: int) -> Float[Array, "T Y"]:
    """The first columns, without those of filling zeros, if there are some."""
    if values.shape[1] == number:
        return values
    return values[:, :number]


def _products(
    x: Float[Array, "T I"], matrices: Sequence[Packed], devices: int
) -> list[Float[Array, "T O"]]:
    """`packed_products`, with zeros for the inputs that fill the matrices."""
    stack = matrices[0].stack
    missing = stack.shape[2] * inputs_each(stack.dtype) - x.shape[1]
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing)))
    return packed_products(x, matrices, devices)


def _packed_shape(
    plain: Array | jax.ShapeDtypeStruct, layout: PackedLayout
) -> jax.ShapeDtypeStruct:
    shape = jax.eval_shape(partial(pack, width=layout.width), plain)
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=layout.sharding)


def _packed(plain: Float[Array, "*L I O"], layout: PackedLayout) -> Float[Array, "*L N J W"]:
    if plain.ndim == 2:
        return _packing(layout.width, layout.sharding, is_table=False)(plain)
    shape = _packed_shape(plain, layout)
    stack = jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)
    for layer in range(plain.shape[0]):  # one by one: the temporary memory is that of a layer
        stack = _putting(layout.width)(stack, plain, np.int32(layer))
    return stack


@cache
def _packing(width: int, sharding: NamedSharding, *, is_table: bool) -> Callable[[Array], Array]:
    return jax.jit(
        lambda plain: pack(plain.T if is_table else plain, width), out_shardings=sharding
    )


@cache
def _putting(width: int) -> Callable[[Array, Array, np.int32], Array]:
    def put(
        stack: Float[Array, "L *X N J W"], plain: Float[Array, "L *X I O"], layer: Int[Array, ""]
    ) -> Array:
        matrix = jax.lax.dynamic_index_in_dim(plain, layer, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(stack, pack(matrix, width), layer, axis=0)

    return jax.jit(put, donate_argnums=0)
