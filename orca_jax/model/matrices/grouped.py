"""Matrices of files for products of XLA: numbers of 8 or 4 bits with scales of groups of inputs."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from orca_jax.kernels.matmul import PER_BYTE, MatrixKind, Quantised
from orca_jax.model.matrices.scaled import QuantisedExperts, QuantisedMatrix
from orca_jax.model.sharding import MESH_AXES, partition_spec
from orca_jax.values.config import DType

FEWEST = 32  # inputs of a group that is a part of one in files


class GroupedForm(NamedTuple):
    """The form of a matrix.

    Attributes:
        kind: that of its values.
        group: the inputs of a group.
        has_zero: groups have zero points.
        scale: the type of the scales of groups.
        has_order: the inputs have an order of their own.
    """

    kind: MatrixKind
    group: int
    has_zero: bool = False
    scale: DType = "float32"
    has_order: bool = False


class GroupedNumbers(NamedTuple):
    """The values of a `kernels.matmul.Quantised`, read from files; `order` is that of the inputs, if they have one."""

    values: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None = None
    order: np.ndarray | None = None


def kept_group(size: int, inputs: int) -> int | None:
    """The inputs of a group in memory, for groups of `size` in files; None if the last one is too much smaller.

    Groups of a row have equal sizes in memory, so one in the files may become several with the same scale.
    """
    shared = math.gcd(size, inputs)
    if shared in (size, inputs) or shared >= FEWEST:
        return shared
    return None


def grouped_shapes(
    plain: nnx.Param[Any], form: GroupedForm
) -> QuantisedMatrix | QuantisedExperts | None:
    """The shapes of a matrix or of a stack in a form of files.

    A group of inputs of experts becomes several where it reaches over the edge of a device. None if a byte has inputs
    of two groups or devices, or if inputs with an order are those of experts or of several devices.

    Args:
        plain: its sharded shape, with logical axes.
        form: that of the files.
    """
    held = plain.get_value()
    axes: tuple[str, ...] = plain.get_metadata("axes")
    *stack, inputs, outputs = held.shape
    mesh = held.sharding.mesh
    splits = 1 if MESH_AXES[axes[-2]] is None else mesh.size
    has_experts = "experts" in axes
    per_byte = PER_BYTE[form.kind]
    group = form.group
    if has_experts:
        group = math.gcd(group, inputs // splits)
    if inputs // splits % per_byte or group % per_byte:
        return None
    if form.has_order and (has_experts or splits > 1):
        return None
    of_groups = axes[-2] if has_experts else "groups"

    def shape(sizes: tuple[int, ...], dtype: Any, *inputs_axis: str) -> Any:
        names = (*axes[:-2], *inputs_axis, axes[-1])
        sharding = NamedSharding(mesh, partition_spec(names))
        return jax.ShapeDtypeStruct((*stack, *sizes, outputs), dtype, sharding=sharding)

    groups = inputs // group
    zero = None
    if form.has_zero:
        zero = shape((groups,), jnp.int16, of_groups)
    if groups == 1 and zero is None and per_byte == 1:
        scale = shape((), jnp.dtype(form.scale))
    else:
        scale = shape((groups,), jnp.dtype(form.scale), of_groups)
    kind = jnp.float8_e4m3fn if form.kind == "fp8" else jnp.int8
    parts = Quantised(shape((inputs // per_byte,), kind, axes[-2]), scale, zero)
    is_stacked = "layers" in axes
    if has_experts:
        _, first, last = axes[-3:]
        names = ("experts", first, last)
        return QuantisedExperts(
            parts, names, form.kind, held.dtype, is_stacked=is_stacked, groups=of_groups
        )
    order: Any = None
    if form.has_order:
        sharding = NamedSharding(mesh, partition_spec((*axes[:-2], "groups")))
        order = jax.ShapeDtypeStruct((*stack, inputs), jnp.int32, sharding=sharding)
    return QuantisedMatrix(
        parts,
        (axes[-2], axes[-1]),
        form.kind,
        held.dtype,
        splits,
        is_stacked=is_stacked,
        order=order,
    )


def grouped_integers(
    numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, bits: int
) -> GroupedNumbers:
    """Integers for products of XLA.

    Args:
        numbers: integers from 0 on, uint8 [O, I].
        scales: factors of groups [O, G].
        zeros: zero points of groups [O, G]; None for the middle of the numbers.
        bits: the size of a number, 4 or 8.
    """
    middle = 1 << (bits - 1)
    signed = (numbers.T.astype(np.int16) - middle).astype(np.int8)
    if bits == 4:
        signed = (signed[0::2] & 15) | (signed[1::2] << 4)
    zero = None
    if zeros is not None:
        zero = (zeros.T - middle).astype(np.int16)
    return GroupedNumbers(signed, scales.T, zero)
