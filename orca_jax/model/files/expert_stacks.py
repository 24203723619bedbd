"""Tensors of files with the matrices of all experts of a layer, as one matrix for each expert.

A row of the table of weights names such a matrix "NAME[{expert}]". A tensor in the format MXFP4 has two: NAME_blocks,
of groups of 32 numbers with two in a byte, and NAME_scales, a power of two for each group. These matrices are stored
from outputs to inputs, whatever the plain ones are (Open Compute Project, Microscaling Formats, version 1.0).
"""

from dataclasses import dataclass, replace

import numpy as np

from orca_jax.model.families.base import Weight
from orca_jax.model.files.opened import OpenFile
from orca_jax.model.files.safetensors import StoredTensor
from orca_jax.model.files.stripes import DTYPES, FileMatrix, TensorRows

OF_EXPERT = "[{expert}]"  # ends the key of a matrix in a tensor of all experts
_BLOCKS, _SCALES = "_blocks", "_scales"
_GROUP_BYTES = 16
MXFP4_GROUP = 2 * _GROUP_BYTES  # numbers with one scale
MOST_EXPERTS = 4096  # a damaged file may claim any number
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


@dataclass(frozen=True)
class Mxfp4Matrix(FileMatrix):
    """A matrix stored in MXFP4: groups of numbers from a byte of a file on, scales from another byte on.

    Its type is that of the values read. bfloat16 holds each product of a number and a scale.
    """

    scales: int  # their first byte, in `file_of_scales`
    file_of_scales: OpenFile

    def read_into(self, start: int, values: np.ndarray) -> None:
        """Read the rows from `start` on into a contiguous matrix."""
        packed, powers = self.read_codes(start, start + len(values))
        scaled = np.ldexp(e2m1_numbers(packed), powers[..., None])
        values[...] = scaled.reshape(values.shape).astype(self.dtype)

    def read_codes(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of some rows by groups [O, G, 16], and the power of two of each group [O, G]. Raises OSError."""
        count = stop - start
        groups = self.num_columns // MXFP4_GROUP
        packed = np.empty((count, groups, _GROUP_BYTES), np.uint8)
        self.file.read_into(self.begin + start * groups * _GROUP_BYTES, packed)
        exponents = np.empty((count, groups), np.uint8)
        self.file_of_scales.read_into(self.scales + start * groups, exponents)
        return packed, exponents.astype(np.int32) - 127


def e2m1_numbers(stored: np.ndarray) -> np.ndarray:
    """The numbers of bytes, float32, two of each along the last axis: the first is in the low half."""
    numbers = np.stack([E2M1[stored & 15], E2M1[stored >> 4]], axis=-1)
    return numbers.reshape(*stored.shape[:-1], 2 * stored.shape[-1])


def has_stacks(table: tuple[Weight, ...]) -> bool:
    """True if some matrices of experts are, or may be, in one tensor."""
    rows = filter(None, [*table, *[weight.instead for weight in table]])
    return any(row.key.endswith(OF_EXPERT) for row in rows)


def with_matrices(
    tensors: dict[str, StoredTensor],
) -> tuple[dict[str, StoredTensor], dict[str, TensorRows]]:
    """The tensors with the matrices of experts in place of the tensors that have them, and these matrices.

    Empty tensors stay whole, and fit nothing: a small file may claim any number of them.

    Args:
        tensors: those of all files.
    """
    found = dict(tensors)
    rows = dict[str, TensorRows]()
    for name, tensor in tensors.items():
        if 0 in tensor.shape:
            continue
        scales = tensors.get(f"{name.removesuffix(_BLOCKS)}{_SCALES}")
        if (
            name.endswith(_BLOCKS)
            and scales is not None
            and tensor.shape == (*scales.shape, _GROUP_BYTES)
        ):
            if (tensor.dtype, scales.dtype, len(scales.shape)) != ("U8", "U8", 3) or scales.shape[
                0
            ] > MOST_EXPERTS:
                continue
            stem, count, outputs, inputs = (
                name.removesuffix(_BLOCKS),
                *scales.shape[:2],
                32 * scales.shape[2],
            )
            for expert in range(count):
                key = f"{stem}[{expert}]"
                place = expert * outputs
                begin = tensor.begin + place * inputs // 2
                at = scales.begin + place * inputs // 32
                found[key] = StoredTensor("BF16", (outputs, inputs), begin, tensor.file)
                rows[key] = Mxfp4Matrix(
                    key,
                    outputs,
                    inputs,
                    DTYPES["BF16"],
                    tensor.file,
                    begin,
                    at,
                    scales.file,
                )
            del found[name], found[stem + _SCALES]
        elif len(tensor.shape) == 3 and tensor.shape[1] != 1 and tensor.dtype in DTYPES:
            if tensor.shape[0] > MOST_EXPERTS:
                continue
            count, outer, inner = tensor.shape
            size = outer * inner * DTYPES[tensor.dtype].itemsize
            for expert in range(count):
                key = f"{name}[{expert}]"
                begin = tensor.begin + expert * size
                found[key] = tensor._replace(shape=(outer, inner), begin=begin)
                rows[key] = found[key].matrix(key)
            del found[name]
    return found, rows


def oriented(table: tuple[Weight, ...], rows: dict[str, TensorRows]) -> tuple[Weight, ...]:
    """The table for files that may have matrices of experts in MXFP4."""
    if not any(isinstance(matrix, Mxfp4Matrix) for matrix in rows.values()):
        return table
    return tuple(
        replace(weight, transpose=True) if weight.key.endswith(OF_EXPERT) else weight
        for weight in table
    )
