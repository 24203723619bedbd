"""The shapes of matrices in few bits on their devices, and the forms of the numbers in files."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from orca_jax.kernels.native import INPUTS, PackedBits, part_inputs
from orca_jax.model.matrices.layout import PackedLayout
from orca_jax.model.sharding import MESH_AXES, partition_spec


class BitsForm(NamedTuple):
    """The form of a matrix in files: its bits, and the inputs of a group.

    `unit` is the number of groups whose scales and minima are integers times units; without them, 0, these are float16,
    or float32 if they are wide. With an order, the rows of a matrix are not in the order of the inputs. Floats
    of 8 bits are numbers of e4m3.
    """

    bits: int
    group: int = 32
    has_minima: bool = False
    unit: int = 0
    is_wide: bool = False
    has_order: bool = False
    is_float: bool = False


def stored_shapes(
    sizes: tuple[int, int], layout: PackedLayout, form: BitsForm
) -> PackedBits | None:
    """The shapes of a matrix with inputs and outputs of these sizes; None if it has no packed form."""
    inputs, outputs = sizes
    bits = form.bits
    group = form.group
    unit = form.unit
    splits, parts = splits_of(layout)
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
    words = shape(inputs * bits // 32, jnp.uint32)
    packed = PackedBits(words, factors, bits, is_float=form.is_float)
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


def stacked(first: Sequence[int], shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of a stack: its axes, such as layers and experts, before those of a matrix."""
    return jax.ShapeDtypeStruct((*first, *shape.shape), shape.dtype)


def bits_axes(layout: PackedLayout, num_groups: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The logical axes of words and of scales. A single group has the inputs of all devices."""
    *stack, inputs, outputs = layout.axes
    groups = "groups" if num_groups == 1 else inputs
    return (*stack, outputs, inputs, "columns"), (*stack, outputs, groups, "columns")


def bits_specs(layout: PackedLayout, packed: PackedBits) -> PackedBits:
    """The partition of each array over the mesh."""
    words, scales = map(partition_spec, bits_axes(layout, packed.scales.shape[-2]))
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


def bits_shardings(layout: PackedLayout, packed: PackedBits) -> PackedBits:
    """The sharding of each array."""
    shardings: PackedBits = jax.tree.map(
        lambda spec: NamedSharding(layout.mesh, spec), bits_specs(layout, packed)
    )
    return shardings


def placed_shapes(shapes: PackedBits, layout: PackedLayout) -> PackedBits:
    """The shapes of a matrix or of a stack, each with its sharding."""
    placed: PackedBits = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        bits_shardings(layout, shapes),
    )
    return placed


def splits_of(layout: PackedLayout) -> tuple[int, int]:
    """The devices over which inputs and outputs are split."""
    inputs, outputs = (MESH_AXES[axis] is not None for axis in layout.axes[-2:])
    return layout.mesh.size**inputs, layout.mesh.size**outputs
