"""Weights in 8 or 4 bits with scales: their values, their products, and their place in the tree of parameters.

    int8  values int8    [I, O], a scale for each output
    fp8   values float8  [I, O], e4m3, a scale for each output
    int4  values int8    [I / 2, O], inputs 2i and 2i + 1 in the low and the high four bits of a byte; a scale for
                         each group of up to 128 inputs of an output

Tables of the vocabulary are int8 in every kind, with a scale for each row. Activations keep their type. A scale follows
from whole columns of a matrix, before it is split over devices, so the values do not depend on the mesh.

On a CPU a product converts a few rows at a time, which stay in its caches. XLA would write the converted matrix to
memory at every use otherwise, and take ten times as long for a few tokens (docs/quantisation.md).
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Num

from orca_jax.config import Quantization
from orca_jax.errors import ConfigError
from orca_jax.kernels.expert_mlp import KernelForm
from orca_jax.kernels.kv_pages import E4M3_IN_16, bits_in_16
from orca_jax.kernels.native import FewBits

GROUP = 128  # inputs that share a scale of int4
BLOCK = 128  # rows of values that a CPU converts at once
WEIGHT_BYTES: Mapping[Quantization, float] = {"int8": 1, "fp8": 1, "int4": 0.5}  # without scales
_LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 8.0}
_TYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.int8}
_NAMES = ("kernel", "table", "mlp.gate", "mlp.up", "mlp.down")  # of parameters; the last three are those of experts
_ENDS = tuple(f".{name}.{part}" for name in _NAMES for part in ("values", "scale"))


class Quantised(NamedTuple):
    """Values and their scales; see the head of this module."""

    values: Num[Array, "*layers J O"]
    scale: Float[Array, "*layers G O"] | Float[Array, "*layers O"]


class Storage(NamedTuple):
    """How weights are stored.

    `kind` is the quantisation, None for none; `shards` is the number of devices that share a matrix.
    """

    kind: Quantization | None = None
    shards: int = 1


def group_size(inputs: int, splits: int = 1) -> int:
    """Inputs for each scale of int4; or with inputs split over devices, for each scale and device."""
    return math.gcd(inputs // splits, GROUP)


def quantise(weight: Float[Array, "*layers I O"], kind: Quantization) -> Quantised:
    """Quantise a matrix, or each matrix of a stack; products with them follow the last axis but one.

    Args:
        weight: the matrix of any type of floating point.
        kind: the kind of the result.

    Raises:
        ConfigError: int4 needs an even number of inputs.
    """
    if weight.ndim > 2:  # one after the other: temporary values of a whole stack would take several times its memory
        stacked: Quantised = lax.map(partial(quantise, kind=kind), weight)
        return stacked
    check_inputs(kind, weight.shape[0], 1)
    weight = weight.astype(jnp.float32)
    if kind == "int4":
        return _four_bits(weight)
    scale = _not_zero(jnp.abs(weight).max(axis=0) / _LARGEST[kind])
    values = weight / scale
    return Quantised((values if kind == "fp8" else jnp.round(values)).astype(_TYPES[kind]), scale)


def _four_bits(weight: Float[Array, "I O"]) -> Quantised:
    """The number of largest magnitude in a group becomes -8, so that all sixteen values are in use."""
    inputs, outputs = weight.shape
    groups = weight.reshape(-1, group_size(inputs), outputs)
    least, most = groups.min(axis=1), groups.max(axis=1)
    scale = _not_zero(jnp.where(most > -least, most, least) / -_LARGEST["int4"])
    values = jnp.clip(jnp.round(groups / scale[:, None]), -8, 7).astype(jnp.int8).reshape(-1, 2, outputs)
    packed = (values[:, 0] & 15) | (values[:, 1] << 4)
    return Quantised(packed, scale)


def _not_zero(scale: Float[Array, "*any"]) -> Float[Array, "*any"]:
    return jnp.where(scale == 0, 1.0, scale)


def quantise_rows(table: Float[Array, "V E"]) -> Quantised:
    """Quantise a table to int8 with a scale for each row."""
    table = table.astype(jnp.float32)
    scale = _not_zero(jnp.abs(table).max(axis=1) / _LARGEST["int8"])
    return Quantised(jnp.round(table / scale[:, None]).astype(jnp.int8), scale)


def quantised_parts(path: str, array: Array, held: Mapping[str, Any], kind: Quantization | None) -> dict[str, Array]:
    """The parameters that a decoder has in place of a plain one.

    Args:
        path: the path of the plain parameter, such as "blocks.mlp.up.kernel".
        array: its values, on their devices; of one layer or of a stack.
        held: a sharded shape for each parameter of the decoder, by path.
        kind: the kind of the decoder's matrices.

    Returns:
        `array` itself, or its values and scales: "blocks.mlp.up.kernel.values" and "blocks.mlp.up.kernel.scale".
    """
    if path in held:
        return {path: array}
    assert kind is not None, f"{path} is not a parameter of a decoder with plain weights"
    names = [f"{path}.{part}" for part in Quantised._fields]
    values, scale = (held[name] for name in names)
    make: Callable[[Array], Quantised] = quantise_rows if path.endswith(".table") else partial(quantise, kind=kind)
    parts = jax.jit(make, out_shardings=Quantised(values.sharding, scale.sharding))(array)
    jax.block_until_ready(parts)  # so that no other plain parameters wait in memory
    return dict(zip(names, parts, strict=True))


def is_quantised_part(path: str) -> bool:
    """True for the values or scales of a quantised parameter."""
    return path.endswith(_ENDS)


def check_inputs(kind: Quantization | None, inputs: int, splits: int) -> None:
    """Check that a matrix can be stored. Raises ConfigError: a byte of int4 would have inputs of two devices."""
    if kind == "int4" and group_size(inputs, splits) < 2:
        each = f"{inputs // splits} of {inputs} inputs of a matrix on each device" if splits > 1 else f"{inputs} inputs"
        message = f"quantization int4 stores two inputs in a byte, and there are {each}: use int8"
        raise ConfigError(message, param="quantization")


class _StoredParts(nnx.Module):
    """Values and scales as parameters with logical axes. The last two of `axes` are inputs and outputs."""

    def __init__(self, parts: Quantised, axes: tuple[str, ...], kind: Quantization, *, is_stacked: bool) -> None:
        *first, inputs, outputs = ("layers", *axes) if is_stacked else axes
        self.values = nnx.Param(parts.values, axes=(*first, inputs, outputs))
        # A group of inputs may reach over the edge of a device, so each device has the scales of all groups.
        self.scale = nnx.Param(parts.scale, axes=(*first, *(("groups",) if kind == "int4" else ()), outputs))

    @property
    def parts(self) -> Quantised:
        """The values and scales; within `shard_map`, those of this device."""
        return Quantised(self.values[...], self.scale[...])


class QuantisedMatrix(_StoredParts):
    """A quantised matrix in the place of a parameter.

    Args:
        parts: its values and scales, with a leading axis for layers if `is_stacked`.
        axes: logical axes of inputs and outputs.
        kind: the kind of the values.
        dtype: type of the operands of products.
        splits: devices over which the inputs are split.
        is_stacked: true if there is a leading axis for layers.
    """

    def __init__(
        self,
        parts: Quantised,
        axes: tuple[str, str],
        kind: Quantization,
        dtype: jnp.dtype,
        splits: int,
        *,
        is_stacked: bool,
    ) -> None:
        super().__init__(parts, axes, kind, is_stacked=is_stacked)
        self.kind: Quantization = kind
        self.dtype = dtype
        self.splits = splits

    def product(self, x: Float[Array, "T I"]) -> Float[Array, "T O"]:
        """`x` times this matrix, with float32 sums."""
        return product(x, self.parts, self.kind, self.dtype, self.splits)


class QuantisedExperts(_StoredParts):
    """The quantised matrices of all experts in the place of a parameter, as each device has its part of them.

    Args:
        parts: values and scales, with a first axis for experts, after one for layers if `is_stacked`.
        axes: logical axes of experts, inputs and outputs.
        kind: the kind of the values.
        dtype: type of the operands of products.
        is_stacked: true if there is a leading axis for layers.
    """

    def __init__(
        self, parts: Quantised, axes: tuple[str, str, str], kind: Quantization, dtype: jnp.dtype, *, is_stacked: bool
    ) -> None:
        super().__init__(parts, axes, kind, is_stacked=is_stacked)
        self.form = KernelForm(
            multiply=partial(product, kind=kind, dtype=dtype), expand=partial(expand, kind=kind, dtype=dtype)
        )


class QuantisedTable(nnx.Module):
    """A table in int8 with a scale for each row, split by rows over `splits` devices."""

    def __init__(self, parts: Quantised, axes: tuple[str, str], dtype: jnp.dtype, splits: int) -> None:
        self.values = nnx.Param(parts.values, axes=axes)
        self.scale = nnx.Param(parts.scale, axes=axes[:1])
        self.dtype = dtype
        self.splits = splits

    def rows(self, index: Num[Array, "T"]) -> Float[Array, "T E"]:
        """The rows `index`; one out of range gets the nearest row."""
        values = self.values[...].at[index].get(mode="clip").astype(jnp.float32)
        return values * self.scale[...].at[index].get(mode="clip")[:, None]

    def scores(self, hidden: Float[Array, "B E"]) -> Float[Array, "B V"]:
        """Inner product of every hidden vector with every row."""
        values, scale = self.values[...], self.scale[...]
        products: Array = lax.platform_dependent(
            hidden.astype(self.dtype),
            values,
            cpu=partial(_scores_by_blocks, splits=self.splits),
            default=lambda hidden, values: _dot("be,ve->bv", hidden, values.astype(hidden.dtype)),
        )
        return products * scale


def product(
    x: Float[Array, "T I"], weight: Quantised, kind: Quantization, dtype: jnp.dtype, splits: int = 1
) -> Float[Array, "T O"]:
    """`x` times a quantised matrix: operands in `dtype`, float32 sums, and the scales after the sums.

    Args:
        x: activations.
        weight: one matrix.
        kind: the kind of the matrix.
        dtype: type of the products' operands.
        splits: devices over which the inputs are split. Each adds up its own ones, before one sum over all.
    """
    result: Array = lax.platform_dependent(
        x.astype(dtype),
        weight,
        cpu=partial(_by_blocks, kind=kind, splits=splits),
        default=partial(_at_once, kind=kind),
    )
    return result


def expand(weight: Quantised, kind: Quantization, dtype: jnp.dtype) -> Float[Array, "*layers I O"]:
    """The plain matrices of `dtype` that quantised ones stand for."""
    if kind != "int4":
        return (weight.values.astype(jnp.float32) * weight.scale[..., None, :]).astype(dtype)
    values = jnp.stack(_lanes(weight.values), axis=-2).astype(jnp.float32)  # [*layers, J, 2, O]
    *layers, inputs, _, outputs = values.shape
    groups = values.reshape(*layers, weight.scale.shape[-2], -1, outputs)
    return (groups * weight.scale[..., None, :]).reshape(*layers, 2 * inputs, outputs).astype(dtype)


def few_bits(weight: Quantised, form: str) -> FewBits:
    """The matrix from inputs to outputs that stored values stand for.

    Args:
        weight: one matrix, or a table.
        form: "int8", "int4", or "table" for a table with a scale for each row.
    """
    if form == "table":
        return FewBits(weight.values.T, weight.scale[None], 8)
    if form == "int8":
        return FewBits(weight.values, weight.scale[None], 8)
    values = jnp.stack(_lanes(weight.values), axis=1)
    return FewBits(values.reshape(-1, values.shape[-1]), weight.scale, 4)


def _by_blocks(x: Float[Array, "T I"], weight: Quantised, kind: Quantization, splits: int) -> Float[Array, "T O"]:
    """Convert some rows of the values, multiply, add up, and continue with the next rows."""
    lanes = 2 if kind == "int4" else 1  # inputs in a row of values
    values = weight.values.reshape(splits, -1, weight.values.shape[-1])  # [S, J, O]
    inputs = x.reshape(x.shape[0], splits, -1, lanes).transpose(3, 1, 0, 2)  # [lanes, S, T, J]
    rows = values.shape[1]
    size = group_size(x.shape[1], splits) // 2 if kind == "int4" else min(rows, BLOCK)

    scale = weight.scale
    if kind == "int4":  # [S, G, O]
        scale = jnp.repeat(scale, rows * splits // size // len(scale), axis=0).reshape(splits, -1, scale.shape[1])

    def block(index: Array | int, size: int) -> Float[Array, "S T O"]:
        start = index * size
        converted = _on_cpu(lax.dynamic_slice_in_dim(values, start, size, axis=1), kind, x.dtype)
        pairs = zip(lax.dynamic_slice_in_dim(inputs, start, size, axis=3), converted, strict=True)
        total = sum((_dot("stj,sjo->sto", *pair) for pair in pairs), start=jnp.float32(0))
        if kind != "int4":
            return total
        return total * lax.dynamic_slice_in_dim(scale, index, 1, axis=1)

    total = jnp.zeros((splits, x.shape[0], values.shape[2]), jnp.float32)
    total = lax.fori_loop(0, rows // size, lambda index, total: total + block(index, size), total)
    if rest := rows % size:
        converted = _on_cpu(values[:, rows - rest :], kind, x.dtype)
        total += _dot("stj,sjo->sto", inputs[0, :, :, rows - rest :], converted[0])
    return total.sum(axis=0) * _after(weight, kind)


def _at_once(x: Float[Array, "T I"], weight: Quantised, kind: Quantization) -> Float[Array, "T O"]:
    """Convert all values, in the same operation as the product if the compiler joins them."""
    if kind != "int4":
        return _dot("ti,io->to", x, weight.values.astype(x.dtype)) * weight.scale
    groups = weight.values.reshape(weight.scale.shape[0], -1, weight.values.shape[1])
    scaled = (lane.astype(jnp.float32) * weight.scale[:, None] for lane in _lanes(groups))
    pairs = ((x[:, lane::2], each.reshape(weight.values.shape)) for lane, each in enumerate(scaled))
    return sum((_dot("ti,io->to", inputs, each.astype(x.dtype)) for inputs, each in pairs), start=jnp.float32(0))


def _on_cpu(values: Num[Array, "*any"], kind: Quantization, dtype: jnp.dtype) -> tuple[Float[Array, "*any"], ...]:
    """The numbers of each lane of stored values, without scales."""
    if kind == "int4":
        return tuple(lane.astype(dtype) for lane in _lanes(values))
    if kind == "int8":
        return (values.astype(dtype),)
    return (bits_in_16(values).astype(dtype),)


def _after(weight: Quantised, kind: Quantization) -> Array:
    """The factor on the sums over `_on_cpu`."""
    factors = {"int4": jnp.float32(1), "int8": weight.scale, "fp8": weight.scale * E4M3_IN_16}
    return factors[kind]


def _lanes(values: Num[Array, "*any"]) -> tuple[Num[Array, "*any"], Num[Array, "*any"]]:
    """The low and the high four bits of bytes, with their signs."""
    four = jnp.int8(4)
    return lax.shift_right_arithmetic(values << four, four), lax.shift_right_arithmetic(values, four)


def _scores_by_blocks(hidden: Float[Array, "B E"], values: Num[Array, "V E"], splits: int) -> Float[Array, "B V"]:
    """`_by_blocks` for a table with rows in whole blocks, without the scales."""
    blocks = values.reshape(splits, -1, BLOCK, values.shape[1])

    def block(index: Array, scores: Array) -> Array:
        rows = lax.dynamic_index_in_dim(blocks, index, axis=1, keepdims=False).astype(hidden.dtype)
        found = _dot("sre,be->srb", rows, hidden)
        return lax.dynamic_update_index_in_dim(scores, found, index, axis=1)

    shape = (*blocks.shape[:3], hidden.shape[0])
    scores = lax.fori_loop(0, blocks.shape[1], block, jnp.zeros(shape, jnp.float32))
    return scores.reshape(values.shape[0], -1).T


def _dot(equation: str, left: Array, right: Array) -> Array:
    """A product with float32 sums. Operands in float32 get full products even if TF32 is the default."""
    precision = lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
    return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=jnp.float32)
