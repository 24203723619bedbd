"""Weights in 8 or 4 bits with scales: their values, and their place in the tree of parameters.

    int8  values int8    [I, O], a scale for each output
    fp8   values float8  [I, O], e4m3, a scale for each output
    int4  values int8    [I / 2, O], inputs 2i and 2i + 1 in the low and the high four bits of a byte; a scale in
                         float16 for each group of up to 32 inputs of an output

Tables of the vocabulary are int8 in every kind, with a scale for each row. Activations keep their type. A scale follows
from whole columns of a matrix, before it is split over devices, so the values do not depend on the mesh.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from orca_jax.kernels.matmul import MatrixKind, Quantised, group_size, lanes, numbers_of
from orca_jax.kernels.native import FewBits
from orca_jax.values.config import Quantization
from orca_jax.values.errors import ConfigError

WEIGHT_BYTES: Mapping[Quantization, float] = {"int8": 1, "fp8": 1, "int4": 0.5}  # without scales
_LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 8.0}
_TYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn, "int4": jnp.int8}
# of parameters; the last three are those of experts
_NAMES = ("kernel", "table", "mlp.gate", "mlp.up", "mlp.down")
_ENDS = tuple(f".{name}.{part}" for name, part in product(_NAMES, ("values", "scale")))


def quantise(weight: Float[Array, "*layers I O"], kind: Quantization) -> Quantised:
    """Quantise a matrix, or each matrix of a stack; products with them follow the last axis but one.

    Args:
        weight: the matrix of any type of floating point.
        kind: the kind of the result.

    Raises:
        ConfigError: int4 needs an even number of inputs.
    """
    # one after the other: temporary values of a whole stack would take several times its memory
    if weight.ndim > 2:
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
    """First the number of largest magnitude in a group becomes -8, so that all sixteen values are in use.

    Then the scale is the best one for these values, by least squares, and all numbers are rounded again.
    """
    inputs, outputs = weight.shape
    groups = weight.reshape(-1, group_size(inputs), outputs)
    least = groups.min(axis=1)
    most = groups.max(axis=1)

    def rounded(scale: Float[Array, "G O"]) -> Float[Array, "G S O"]:
        return jnp.clip(jnp.round(groups / scale[:, None]), -8, 7)

    first = rounded(_not_zero(jnp.where(most > -least, most, least) / -_LARGEST["int4"]))
    fitted = (groups * first).sum(axis=1) / jnp.maximum(jnp.square(first).sum(axis=1), 1)
    scale = _not_zero(fitted.astype(jnp.float16))
    values = rounded(scale.astype(jnp.float32)).astype(jnp.int8).reshape(-1, 2, outputs)
    packed = (values[:, 0] & 15) | (values[:, 1] << 4)
    return Quantised(packed, scale)


def _not_zero(scale: Float[Array, "*any"]) -> Float[Array, "*any"]:
    return jnp.where(scale == 0, jnp.ones_like(scale), scale)


def quantise_rows(table: Float[Array, "V E"]) -> Quantised:
    """Quantise a table to int8 with a scale for each row."""
    table = table.astype(jnp.float32)
    scale = _not_zero(jnp.abs(table).max(axis=1) / _LARGEST["int8"])
    return Quantised(jnp.round(table / scale[:, None]).astype(jnp.int8), scale)


def quantised_parts(
    path: str, array: Array, held: Mapping[str, Any], kind: Quantization | None
) -> dict[str, Array]:
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
    values = f"{path}.values"
    scale = f"{path}.scale"
    quantised = _quantising(
        None if path.endswith(".table") else kind, held[values].sharding, held[scale].sharding
    )
    parts = quantised(array)
    jax.block_until_ready(parts)  # so that no other plain parameters wait in memory
    return {values: parts.values, scale: parts.scale}


@lru_cache(maxsize=16)
def _quantising(kind: Quantization | None, *shardings: Any) -> Callable[[Array], Quantised]:
    """Return the program for all matrices of one shape, to be compiled once; for tables without a kind."""
    make = quantise_rows if kind is None else partial(quantise, kind=kind)
    return jax.jit(make, out_shardings=Quantised(*shardings))


def is_quantised_part(path: str) -> bool:
    """True for the values or scales of a quantised parameter."""
    return path.endswith(_ENDS)


def check_inputs(kind: Quantization | None, inputs: int, splits: int) -> None:
    """Check that a matrix can be stored. Raises ConfigError: a byte of int4 would have inputs of two devices."""
    if kind == "int4" and group_size(inputs, splits) < 2:
        each = f"{inputs} inputs"
        if splits > 1:
            each = f"{inputs // splits} of {inputs} inputs of a matrix on each device"
        message = f"quantization int4 stores two inputs in a byte, and there are {each}: use int8"
        raise ConfigError(message, param="quantization")


def expand(weight: Quantised, kind: MatrixKind, dtype: jnp.dtype) -> Float[Array, "*layers I O"]:
    """The plain matrices of `dtype` that quantised ones stand for."""
    scale = weight.scale[..., None, :].astype(jnp.float32)
    if not weight.is_grouped:
        return (weight.values.astype(jnp.float32) * scale).astype(dtype)
    values = jnp.stack(numbers_of(weight.values, kind), axis=-2)  # [*layers, J, in a byte, O]
    *layers, inputs, per_byte, outputs = values.shape
    groups = values.astype(jnp.float32).reshape(*layers, scale.shape[-3], -1, outputs)
    if weight.zero is not None:
        groups -= weight.zero[..., None, :].astype(jnp.float32)
    return (groups * scale).reshape(*layers, inputs * per_byte, outputs).astype(dtype)


def few_bits(weight: Quantised, form: str) -> FewBits:
    """The matrix from inputs to outputs that stored values stand for.

    Args:
        weight: one matrix, or a table.
        form: "int8", "fp8", "int4", or "table" for a table with a scale for each row.
    """
    if form == "table":
        return FewBits(weight.values.T, weight.scale[None], 8)
    if form != "int4":
        return FewBits(weight.values, weight.scale[None], 8, is_float=form == "fp8")
    values = jnp.stack(lanes(weight.values), axis=1)
    return FewBits(values.reshape(-1, values.shape[-1]), weight.scale, 4)
