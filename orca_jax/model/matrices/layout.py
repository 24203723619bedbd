"""The place of a packed matrix on its devices, and products on each of them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from orca_jax.kernels.native import LayerRows, Library, Packed
from orca_jax.model.sharding import MESH_AXES, TENSOR_AXIS, partition_spec


class StackParam(nnx.Param[Any]):
    """An array that the library reads. In a layer of a stack, the value is a `kernels.native.Packed`."""

    @property
    def place(self) -> LayerRows | None:
        """The place in the stack; None if there is no stack."""
        value = self.get_value()
        if isinstance(value, Packed):
            return value.place
        return None

    @property
    def num_counted(self) -> Array | None:
        """The number of the first rows of x that a matrix in a stack multiplies; None if it is in no stack."""
        if self.place is None:
            return None
        return self.place.rows


def layer_of(variable: nnx.Variable[Any], place: LayerRows) -> nnx.Variable[Any]:
    """The parameter of one layer. A packed matrix stays in its stack, which the library reads; others are copied."""
    stack = variable.get_value()
    if isinstance(variable, StackParam):
        return variable.replace(Packed(stack, place))
    return variable.replace(jax.lax.dynamic_index_in_dim(stack, place.layer, keepdims=False))


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
