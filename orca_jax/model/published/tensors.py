"""The matrices that several tensors of a file make together: "q_proj.weight" of "q_proj.qweight" and its scales.

What a matrix is follows from the tensors beside it and not from lists of layers in config.json.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from orca_jax.model.families.base import words
from orca_jax.model.files.safetensors import StoredTensor
from orca_jax.model.files.stripes import DTYPES, TensorRows
from orca_jax.model.published.integers import IntegerMatrix
from orca_jax.model.published.numbers import FP4_GROUP, FloatMatrix, Fp4Matrix
from orca_jax.model.published.parts import (
    Parts,
    Unfit,
    check_part,
    groups_of,
    sizes_of,
)
from orca_jax.model.published.words import (
    WORD_BITS,
    AwqMatrix,
    ByteMatrix,
    CompressedMatrix,
    GptqMatrix,
)
from orca_jax.values.layer_config import StoredForm

UNREAD = (
    "input_scale",
    "output_scale",
    "input_zero_point",
    "input_global_scale",
    "k_scale",
    "v_scale",
)
"""Ends of tensors that quantise activations or the KV cache, which keep their types."""

_SCALE_TYPES = ("F32", "F16", "BF16")


@dataclass
class Published:
    """The tensors of files, with a matrix in place of those that it consists of.

    Attributes:
        tensors: the type and shape of each.
        rows: the matrices.
        optional: tensors that may be left unread.
        problems: a line for each matrix that cannot be read.
    """

    tensors: dict[str, StoredTensor]
    rows: dict[str, TensorRows] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def with_published(tensors: Mapping[str, StoredTensor], form: StoredForm) -> Published:
    """The tensors of all files, with matrices in place of their parts.

    Args:
        tensors: those of all files.
        form: from config.json.

    Raises:
        OSError: a file cannot be read.
    """
    found = Published({key: tensor for key, tensor in tensors.items() if not key.endswith(UNREAD)})
    layout = _LAYOUTS[form.layout]
    for stem, keys in _by_stem(found.tensors, layout.names).items():
        parts = {name: tensors[key] for name, key in keys.items()}
        key = f"{stem}weight"
        try:
            matrix = layout.make(key, parts, form)
        except Unfit as problem:
            found.problems.append(f"{key}: {problem}")
            continue
        if matrix is None:
            continue
        for own in keys.values():
            del found.tensors[own]
        found.tensors[key] = parts[next(iter(parts))]._replace(dtype="F32", shape=matrix.shape)
        found.rows[key] = matrix
        bias = f"{stem}bias"
        if _is_zero(tensors.get(bias)):
            found.optional.add(bias)  # GPTQ writes zeros for layers without a bias
    return found


def _is_zero(tensor: StoredTensor | None) -> bool:
    """True for a vector of zeros. Raises OSError."""
    if tensor is None or tensor.dtype not in DTYPES or len(tensor.shape) != 1:
        return False
    return not tensor.all().any()


def _by_stem(tensors: Iterable[str], names: Collection[str]) -> dict[str, dict[str, str]]:
    """The keys of the parts of each matrix by their names, by the begin of these keys."""
    found: dict[str, dict[str, str]] = {}
    for key in tensors:
        stem, dot, name = key.rpartition(".")
        if name in names:
            found.setdefault(stem + dot, {})[name] = key
    return found


def _gptq(key: str, parts: Parts, form: StoredForm) -> IntegerMatrix | None:
    if "qweight" not in parts:
        return None
    words, outputs = sizes_of(parts, "qweight", "I32")
    inputs = words * WORD_BITS // form.bits
    matrix = _by_inputs(GptqMatrix, key, parts, form, (outputs, inputs))
    if form.is_ordered and "g_idx" not in parts:
        raise Unfit("g_idx is missing, and config.json has desc_act true")
    groups = groups_of(parts, "g_idx", inputs, matrix.num_groups)
    return replace(matrix, groups=groups, zeros=_needed_zeros(matrix))


def _awq(key: str, parts: Parts, form: StoredForm) -> IntegerMatrix | None:
    if "qweight" not in parts:
        return None
    inputs, words = sizes_of(parts, "qweight", "I32")
    return _by_inputs(AwqMatrix, key, parts, form, (words * WORD_BITS // form.bits, inputs))


def _by_inputs(
    kind: type[IntegerMatrix], key: str, parts: Parts, form: StoredForm, shape: tuple[int, int]
) -> IntegerMatrix:
    """A matrix whose rows are inputs, with scales [G, O] and zero points in words of outputs."""
    outputs, inputs = shape
    groups = 1
    if form.group_size:
        groups = -(-inputs // form.group_size)
    if outputs * form.bits % WORD_BITS or inputs % groups:
        raise Unfit(f"{inputs} inputs and {outputs} outputs do not fill groups and words")
    check_part(parts, "scales", _SCALE_TYPES, (groups, outputs))
    check_part(parts, "qzeros", ("I32",), (groups, outputs * form.bits // WORD_BITS))
    return kind(
        key=key,
        shape=shape,
        bits=form.bits,
        numbers=parts["qweight"],
        scales=parts["scales"],
        zeros=parts["qzeros"],
        zero_offset=form.zero_offset,
    )


def _needed_zeros(matrix: IntegerMatrix) -> StoredTensor | None:
    """The zero points; None if all are the middle of the numbers. A group that differs ends the search."""
    for group in range(matrix.num_groups):
        if (matrix.zero_points(group, group + 1) != matrix.middle).any():
            return matrix.zeros
    return None


def _scaled(key: str, parts: Parts, form: StoredForm) -> IntegerMatrix | FloatMatrix | None:
    stored = "weight_packed" if "weight_packed" in parts else "weight"
    if stored not in parts:
        return None
    dtype = parts[stored].dtype
    if dtype == "U8":
        return _fp4(key, stored, parts)
    if dtype == "I32":
        return _packed(key, parts)
    if dtype not in ("I8", "F8_E4M3"):
        return None
    return _bytes(key, parts, form)


def _packed(key: str, parts: Parts) -> IntegerMatrix:
    rows, words = sizes_of(parts, "weight_packed", "I32")
    check_part(parts, "weight_shape", ("I64", "I32"), (2,))
    outputs, inputs = (int(size) for size in parts["weight_shape"].all())
    bits = next((bits for bits in (4, 8) if -(-inputs * bits // WORD_BITS) == words), None)
    if outputs != rows or bits is None:
        raise Unfit(
            f"weight_shape {outputs} x {inputs} has no {rows} x {words} words of 4 or 8 bits"
        )
    _, groups = sizes_of(parts, "weight_scale", *_SCALE_TYPES)
    check_part(parts, "weight_scale", _SCALE_TYPES, (outputs, groups))
    if groups < 1 or inputs % groups:
        raise Unfit(f"{inputs} inputs do not fill {groups} groups")
    if "weight_zero_point" in parts:
        check_part(parts, "weight_zero_point", ("I32",), (-(-outputs * bits // WORD_BITS), groups))
    return CompressedMatrix(
        key=key,
        shape=(outputs, inputs),
        bits=bits,
        numbers=parts["weight_packed"],
        scales=parts["weight_scale"],
        zeros=parts.get("weight_zero_point"),
        groups=groups_of(parts, "weight_g_idx", inputs, groups),
    )


def _bytes(key: str, parts: Parts, form: StoredForm) -> IntegerMatrix | FloatMatrix | None:
    """A matrix of bytes; None without a scale."""
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    if name not in parts:
        return None
    if "weight_zero_point" in parts:
        raise Unfit("weight_zero_point beside numbers of 8 bits is not read")
    outputs, inputs = sizes_of(parts, "weight", "I8", "F8_E4M3")
    block = _block_of(parts[name], (outputs, inputs), form)
    is_integer = parts["weight"].dtype == "I8"
    if is_integer and block[0] == 1 and len(parts[name].shape) == 2:
        return ByteMatrix(
            key=key, shape=(outputs, inputs), bits=8, numbers=parts["weight"], scales=parts[name]
        )
    return FloatMatrix(
        key=key,
        shape=(outputs, inputs),
        numbers=parts["weight"],
        scales=parts[name],
        block=block,
    )


def _block_of(scale: StoredTensor, shape: tuple[int, int], form: StoredForm) -> tuple[int, int]:
    """The outputs and inputs of each scale. Raises Unfit."""
    outputs, inputs = shape
    if scale.dtype not in (*_SCALE_TYPES, "F8_E8M0"):
        raise Unfit(f"scales of the type {scale.dtype} are not read")
    if scale.shape in ((), (1,), (1, 1)):
        return (max(outputs, 1), max(inputs, 1))
    if scale.shape in ((outputs,), (outputs, 1)):
        return (1, max(inputs, 1))
    if len(scale.shape) == 2:
        rows, columns = scale.shape
        if rows == outputs and columns > 0 and inputs % columns == 0:
            return (1, inputs // columns)
        height, width = form.block
        if (rows, columns) == (-(-outputs // height), -(-inputs // width)):
            return form.block
    raise Unfit(f"scales {list(scale.shape)} do not fit a matrix {outputs} x {inputs}")


def _fp4(key: str, stored: str, parts: Parts) -> FloatMatrix | None:
    """A matrix in NVFP4; None without a scale for the matrix."""
    whole = "weight_global_scale" if stored == "weight_packed" else "weight_scale_2"
    if whole not in parts:
        return None
    outputs, half = sizes_of(parts, stored, "U8")
    inputs = 2 * half
    if inputs % FP4_GROUP:
        raise Unfit(f"{inputs} inputs do not fill groups of {FP4_GROUP}")
    check_part(parts, "weight_scale", ("F8_E4M3",), (outputs, inputs // FP4_GROUP))
    tensor = parts[whole]
    if tensor.dtype != "F32" or tensor.shape not in ((), (1,)):
        raise Unfit(f"{whole} must be one number of the type F32")
    return Fp4Matrix(
        key=key,
        shape=(outputs, inputs),
        numbers=parts[stored],
        scales=parts["weight_scale"],
        block=(1, FP4_GROUP),
        whole=parts[whole],
        is_divisor=stored == "weight_packed",
    )


class _PublishedLayout(NamedTuple):
    """The names of the parts of a matrix, and a function that makes one; None for plain tensors. Raises Unfit."""

    names: frozenset[str]
    make: Callable[[str, Parts, StoredForm], IntegerMatrix | FloatMatrix | None]


_LAYOUTS = {
    "gptq": _PublishedLayout(words("qweight qzeros scales g_idx"), _gptq),
    "awq": _PublishedLayout(words("qweight qzeros scales"), _awq),
    "scaled": _PublishedLayout(
        words(
            "weight weight_packed weight_scale weight_scale_inv weight_scale_2 "
            "weight_global_scale weight_zero_point weight_g_idx weight_shape"
        ),
        _scaled,
    ),
}
"""The layouts, by `StoredForm.layout`."""
