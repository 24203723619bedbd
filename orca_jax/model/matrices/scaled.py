"""Matrices and tables in 8 or 4 bits with scales, as products of XLA read them (`quantise.py` has their numbers)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.kernels.expert_mlp import KernelForm
from orca_jax.kernels.matmul import MatrixKind, Quantised, quantised_matmul, quantised_scores
from orca_jax.kernels.native import Library
from orca_jax.model.matrices.few_bits import has_packed_bits, packed_bits, packed_bits_table
from orca_jax.model.matrices.quantise import expand


class _StoredParts(nnx.Module):
    """Values and scales as parameters with logical axes. The last two of `axes` are inputs and outputs.

    `groups` is the axis of the scales' groups. By default each device has the scales of all groups, since a group of
    inputs may reach over the edge of a device.
    """

    is_plain = False

    def __init__(
        self,
        parts: Quantised,
        axes: tuple[str, ...],
        *,
        is_stacked: bool,
        groups: str = "groups",
    ) -> None:
        if is_stacked:
            axes = ("layers", *axes)
        *first, inputs, outputs = axes
        self.values = nnx.Param(parts.values, axes=(*first, inputs, outputs))
        if parts.is_grouped:
            first.append(groups)
        self.scale = nnx.Param(parts.scale, axes=(*first, outputs))
        zero = None
        if parts.zero is not None:
            zero = nnx.Param(parts.zero, axes=(*first, outputs))
        self.zero = nnx.data(zero)

    @property
    def parts(self) -> Quantised:
        """The values and scales; within `shard_map`, those of this device."""
        zero = None if self.zero is None else self.zero[...]
        return Quantised(self.values[...], self.scale[...], zero)


class QuantisedMatrix(_StoredParts):
    """A quantised matrix in the place of a parameter.

    Args:
        parts: its values and scales, with a leading axis for layers if `is_stacked`.
        axes: logical axes of inputs and outputs.
        kind: the kind of the values.
        dtype: type of the operands of products.
        splits: devices over which the inputs are split.
        is_stacked: true if there is a leading axis for layers.
        order: the input of each row of the matrix, int32 [I]; None if they are in order.
    """

    products_of = "scaled"

    def __init__(
        self,
        parts: Quantised,
        axes: tuple[str, str],
        kind: MatrixKind,
        dtype: jnp.dtype,
        splits: int,
        *,
        is_stacked: bool,
        order: Array | None = None,
    ) -> None:
        super().__init__(parts, axes, is_stacked=is_stacked)
        held = None
        if order is not None:
            held = nnx.Param(order, axes=("layers", "groups") if is_stacked else ("groups",))
        self.order = nnx.data(held)
        self.kind: MatrixKind = kind
        self.dtype = dtype
        self.splits = splits

    def products(
        self,
        x: Float[Array, "T I"],
        matrices: "Sequence[QuantisedMatrix]",
        sizes: Int[Array, "X"] | None = None,
    ) -> list[Float[Array, "T O"]]:
        """`x` times each of some matrices, with float32 sums."""
        assert sizes is None, "QuantisedExperts has the matrices of experts"
        return [
            quantised_matmul(each._ordered(x), each.parts, each.kind, each.dtype, each.splits)
            for each in matrices
        ]

    def _ordered(self, x: Float[Array, "T I"]) -> Float[Array, "T I"]:
        """The inputs in the order of the matrix."""
        if self.order is None:
            return x
        return x[:, self.order[...]]

    def packed(self, library: Library, num_devices: int) -> Any:
        """Return the form that the library reads; see `packed_bits`."""
        return packed_bits(self, library, num_devices)

    def has_packed_form(self, library: Library) -> bool:
        """False: stacks are packed layer by layer."""
        return False


class QuantisedExperts(_StoredParts):
    """The quantised matrices of all experts in the place of a parameter, as each device has its part of them.

    Args:
        parts: values and scales, with a first axis for experts, after one for layers if `is_stacked`.
        axes: logical axes of experts, inputs and outputs.
        kind: the kind of the values.
        dtype: type of the operands of products.
        is_stacked: true if there is a leading axis for layers.
        groups: the axis of the scales' groups, if there are some; each device has those of its own inputs.
    """

    products_of = "scaled experts"

    def __init__(
        self,
        parts: Quantised,
        axes: tuple[str, str, str],
        kind: MatrixKind,
        dtype: jnp.dtype,
        *,
        is_stacked: bool,
        groups: str = "groups",
    ) -> None:
        super().__init__(parts, axes, is_stacked=is_stacked, groups=groups)
        self.kind: MatrixKind = kind
        self.dtype = dtype

    def expert_form(self, count: int) -> KernelForm:
        """The arithmetic of the matrices."""
        return KernelForm(
            partial(quantised_matmul, kind=self.kind, dtype=self.dtype),
            partial(expand, kind=self.kind, dtype=self.dtype),
            kind=self.kind,
            dtype=self.dtype,
        )

    @property
    def operand(self) -> Quantised:
        """The values and scales."""
        return self.parts

    def products(
        self,
        x: Float[Array, "T I"],
        matrices: "Sequence[QuantisedExperts]",
        sizes: Int[Array, "X"] | None = None,
    ) -> list[Float[Array, "T O"]]:
        """Not there: products of experts have the arithmetic of `expert_form`."""
        raise AssertionError("quantised matrices of experts have the arithmetic of expert_form")

    def packed(self, library: Library, num_devices: int) -> Any:
        """Return the form that the library reads; see `packed_bits`."""
        return packed_bits(self, library, num_devices)

    def has_packed_form(self, library: Library) -> bool:
        """True if `packed` returns another form."""
        return has_packed_bits(self, library)


class QuantisedTable(nnx.Module):
    """A table in int8 with a scale for each row, split by rows over `splits` devices."""

    is_plain = False
    can_skip = False

    def __init__(
        self, parts: Quantised, axes: tuple[str, str], dtype: jnp.dtype, splits: int
    ) -> None:
        self.values = nnx.Param(parts.values, axes=axes)
        self.scale = nnx.Param(parts.scale, axes=axes[:1])
        self.dtype = dtype
        self.splits = splits

    @property
    def num_rows(self) -> int:
        """Number of rows, padding included."""
        return int(self.values.get_value().shape[0])

    def rows(self, index: Int[Array, "T"]) -> Float[Array, "T E"]:
        """The rows `index` in float32; one out of range gets the nearest row."""
        values = self.values[...].at[index].get(mode="clip").astype(jnp.float32)
        return values * self.scale[...].at[index].get(mode="clip")[:, None]

    def scores(
        self, hidden: Float[Array, "B E"], count: Int[Array, ""] | None = None
    ) -> Float[Array, "B V"]:
        """Inner product of every hidden vector with every row."""
        assert count is None, "only the library skips vectors"
        return quantised_scores(
            hidden, Quantised(self.values[...], self.scale[...]), self.dtype, self.splits
        )

    def packed(self, library: Library, num_devices: int) -> Any:
        """Return the form that the library reads; see `packed_bits_table`."""
        return packed_bits_table(self, library, num_devices)
