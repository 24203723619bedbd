"""Packed matrices of linear layers on CPUs, in the order in which a product reads them (`kernels/native`).

A decoder is packed after it is loaded, matrix by matrix, so the memory has one matrix twice at most. The linear layers
of blocks are packed, the table of the unembedding, and on one device experts (`packed/bits.py` has quantised ones).
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from orca_jax.kernels.native import (
    Library,
    Packed,
    can_pack,
    has_products,
    in_stack,
    inputs_each,
    of_experts,
    pack,
    packed_columns,
    packed_products,
)
from orca_jax.model.sharding import MESH_AXES, TENSOR_AXIS, partition_spec


class PackedMatrix(nnx.Param[Any]):
    """A matrix in the form of `kernels.native.pack`, split over devices as the plain matrix was.

    Its metadata are `axes`, the logical axes of layers if it is a stack, of blocks of outputs, of inputs, and of the
    numbers of a block; `layout`; and `sizes`, the inputs and outputs of the plain matrix. One that no devices share may
    have others than whole blocks hold. In a layer of a stack, the value is a `kernels.native.Packed`.
    """


class PackedLayout(NamedTuple):
    """The place of a packed matrix on its devices."""

    mesh: Mesh
    # logical axes of the plain matrix: layers if it is a stack, inputs and outputs
    axes: tuple[str, ...]
    width: int  # columns of a block
    num_devices: int  # that share the processors of this machine

    @property
    def plain_sharding(self) -> NamedSharding:
        """The sharding of the plain matrix."""
        return NamedSharding(self.mesh, partition_spec(self.axes))

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the packed matrix."""
        return NamedSharding(self.mesh, partition_spec(self.packed_axes))

    @property
    def packed_axes(self) -> tuple[str, ...]:
        """The logical axes of the packed matrix."""
        *stack, inputs, outputs = self.axes
        return (*stack, outputs, inputs, "columns")


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


class PackedTable(PackedMatrix):
    """A table [V, E] in the form of a packed matrix from E to V, as the library reads it for the unembedding."""

    @property
    def num_rows(self) -> int:
        """Number of rows, with those of padding."""
        sizes: tuple[int, int] = self.get_metadata("sizes")
        return sizes[1]

    def rows(self, index: Int[Array, "T"]) -> Float[Array, "T E"]:
        """The rows `index`; one out of range gets the nearest row."""
        index = jnp.clip(index, 0, self.num_rows - 1)
        found = packed_columns(self[...], index, self.get_metadata("layout").width)
        return _columns(found, self.get_metadata("sizes")[0])

    def scores(
        self, hidden: Float[Array, "B E"], count: Int[Array, ""] | None = None
    ) -> Float[Array, "B V"]:
        """Inner product of every hidden vector, or of the first `count`, with every row, with float32 sums."""
        return packed_matmuls(hidden, [self], count)[0]


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
    value: jax.ShapeDtypeStruct = variable.get_value()
    if not isinstance(variable, PackedMatrix):
        return value
    layout: PackedLayout = variable.get_metadata("layout")
    shape = *value.shape[:-3], *variable.get_metadata("sizes")
    if isinstance(variable, PackedTable):
        shape = shape[::-1]
        layout = transposed(layout)
    return jax.ShapeDtypeStruct(shape, value.dtype, sharding=layout.plain_sharding)


def width_in_file(variable: nnx.Variable[Any], num_columns: int, *, is_transposed: bool) -> int:
    """The columns of a block of a packed parameter, if each column is a row of a matrix in a file; 0 if not.

    Args:
        variable: a parameter.
        num_columns: rows of the matrix in the file.
        is_transposed: the plain parameter is the transposed matrix.
    """
    if not isinstance(variable, PackedMatrix) or is_transposed == isinstance(variable, PackedTable):
        return 0
    width: int = variable.get_metadata("layout").width
    value = variable.get_value()
    whole = (value.shape[-2] * inputs_each(value.dtype), value.shape[-3] * width)
    if whole != variable.get_metadata("sizes") or whole[1] != num_columns:
        return 0
    return width


def held_values(variable: nnx.Variable[Any], read: Array) -> Array:
    """The values of a parameter as the decoder holds them, from those with its `plain_shape`."""
    if not isinstance(variable, PackedMatrix):
        return read
    layout: PackedLayout = variable.get_metadata("layout")
    if isinstance(variable, PackedTable):
        return _packing(layout.width, layout.sharding, is_table=True)(read)
    return _packed(read, layout)


def packed_matmuls(
    x: Float[Array, "T I"],
    matrices: Sequence[PackedMatrix],
    count: Int[Array, ""] | None = None,
    sizes: Int[Array, "X"] | None = None,
) -> list[Float[Array, "T O"]]:
    """`x` times each of some packed matrices with the same inputs, with float32 sums, in one call of the library.

    With `count`, single matrices multiply the first rows alone, and the results of others are undefined. With `sizes`,
    they are those of experts on one device, and each multiplies so many rows, one after the other.
    """
    layouts: list[PackedLayout] = [matrix.get_metadata("layout") for matrix in matrices]
    specs = [
        Packed._make((PartitionSpec(None, *layout.sharding.spec[-3:]), PartitionSpec()))
        for layout in layouts
    ]
    values = [matrix.get_value() for matrix in matrices]
    if sizes is not None:
        packed = [of_experts(value, sizes) for value in values]
    elif count is not None:
        packed = [in_stack(value, count) for value in values]
    else:
        packed = [in_stack(value, len(x)) for value in values]
    products = on_shards(
        partial(_products, devices=layouts[0].num_devices), x, layouts, packed, specs
    )
    return [
        _columns(out, matrix.get_metadata("sizes")[1])
        for out, matrix in zip(products, matrices, strict=True)
    ]


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


def on_shards[T](
    multiply: Callable[[Array, list[T]], list[Array]],
    x: Float[Array, "T I"],
    layouts: Sequence[PackedLayout],
    matrices: list[T],
    specs: list[Any],
) -> list[Float[Array, "T O"]]:
    """Products on each device, with the sums over devices if these share the inputs."""
    inputs = MESH_AXES[layouts[0].axes[-2]]

    def on_shard(x: Float[Array, "T I"], matrices: list[T]) -> list[Float[Array, "T O"]]:
        products = multiply(x, matrices)
        if inputs is None:
            return products
        return jax.lax.psum(products, TENSOR_AXIS)

    split = jax.shard_map(
        on_shard,
        mesh=layouts[0].mesh,
        in_specs=(PartitionSpec(None, inputs), specs),
        out_specs=[PartitionSpec(None, MESH_AXES[layout.axes[-1]]) for layout in layouts],
        check_vma=False,  # the sum over devices is done by hand
    )
    products: list[Array] = split(x, matrices)
    return products


def layout_of(plain: nnx.Param[Any], library: Library, num_devices: int) -> PackedLayout:
    """The place of a matrix from its sharded values or shape, and its logical axes."""
    return PackedLayout(
        plain.get_value().sharding.mesh, plain.get_metadata("axes"), library.width, num_devices
    )


def transposed(layout: PackedLayout) -> PackedLayout:
    """The layout of a table as a matrix from its vectors to its rows, and back."""
    return layout._replace(axes=layout.axes[::-1])


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
