"""Matrices of integers in 4 or 8 bits: an entry is `scale * (number - zero point)`, with both for a group of inputs.

    AwqMatrix         words of 8 outputs in an order of their own (AWQ, `version: gemm`)
    GptqMatrix        words of some inputs (GPTQ)
    CompressedMatrix  words of some inputs (compressed-tensors, `pack-quantized`)
    ByteMatrix        bytes (compressed-tensors, `int-quantized`)

The rows of the first two are inputs, and those of the others outputs.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from orca_jax.kernels.native import PackedBits
from orca_jax.model.files.safetensors import StoredTensor
from orca_jax.model.files.stripes import STORED_TYPES, STRIPE_BYTES, read_exactly
from orca_jax.model.packed.bits import BitsForm
from orca_jax.model.packed.blocks import BitsParts, packed_parts
from orca_jax.model.packed.grouped import (
    GroupedForm,
    GroupedNumbers,
    grouped_integers,
)
from orca_jax.values.config import Quantization

WORD_BITS = 32
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place of each of 8 outputs in a word."""


class TensorPart(NamedTuple):
    """A tensor of an open file."""

    tensor: StoredTensor
    descriptor: int

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Some rows of a matrix, in the type of the file. Raises OSError."""
        dtype = STORED_TYPES[self.tensor.dtype]
        _, *columns = self.tensor.shape
        values = np.empty((stop - start, *columns), dtype)
        if values.size:
            row_bytes = values[0].nbytes
            read_exactly(self.descriptor, self.tensor.begin + start * row_bytes, values)
        return values

    def all(self) -> np.ndarray:
        """All values. Raises OSError."""
        values = np.empty(math.prod(self.tensor.shape), STORED_TYPES[self.tensor.dtype])
        if values.size:
            read_exactly(self.descriptor, self.tensor.begin, values)
        return values.reshape(self.tensor.shape)


class _Columns(NamedTuple):
    """Numbers uint8 [O, I], scales and zero points [O, G] of some outputs."""

    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None


@dataclass(frozen=True, eq=False, kw_only=True)
class IntegerMatrix:
    """A matrix of integers in an open file, as rows of dequantised numbers in float32.

    Attributes:
        key: name of the plain tensor.
        shape: outputs and inputs.
        bits: the size of a number, 4 or 8.
        numbers: the words.
        scales: factors of each group and output.
        zeros: the zero points of each group and output in words; None: the middle of the numbers.
        zero_offset: added to stored zero points.
        groups: the group of each input; None: they are in order.
        outputs: the stored output of each output of a parameter, for the bits alone; None: all in order.
    """

    key: str
    shape: tuple[int, int]
    bits: int
    numbers: TensorPart
    scales: TensorPart
    zeros: TensorPart | None = None
    zero_offset: int = 0
    groups: np.ndarray | None = None
    outputs: np.ndarray | None = None

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def num_rows(self) -> int:
        return self.shape[self.is_turned]

    @property
    def num_columns(self) -> int:
        return self.shape[not self.is_turned]

    @property
    def row_bytes(self) -> int:
        return self.num_columns * self.dtype.itemsize

    @property
    def order(self) -> tuple[int, int]:
        return self.numbers.descriptor, self.numbers.tensor.begin

    @property
    def is_turned(self) -> bool:
        return True

    @property
    def num_groups(self) -> int:
        return self.scales.tensor.shape[0]

    def read_into(self, start: int, values: np.ndarray) -> None:
        """Read the rows from `start` on, dequantised, into a contiguous matrix. Raises OSError."""
        stop = start + len(values)
        scales, zeros = self._factors(start, stop)
        np.subtract(self._unpacked(start, stop), zeros, out=values, dtype=np.float32)
        values *= scales

    def fills(self, shape: tuple[int, ...], name: str) -> bool:
        """True unless a matrix of this shape has copies of some outputs. A table may have more rows, for padding."""
        outputs = self.shape[0] if self.outputs is None else len(self.outputs)
        return name == "table" or shape[-1] == outputs

    @property
    def form(self) -> BitsForm | None:
        """The form of the numbers in memory; None if groups have different sizes."""
        if self.groups is not None and len(set(np.bincount(self.groups).tolist())) > 1:
            return None
        return BitsForm(
            self.bits,
            group=self.shape[1] // self.num_groups,
            has_minima=self.zeros is not None,
            is_wide=True,
            has_order=self.groups is not None,
        )

    @property
    def grouped(self) -> GroupedForm | None:
        """The form of the numbers for products of XLA; None if the groups are not in order."""
        if self.groups is not None:
            return None
        kind: Quantization = "int4" if self.bits == 4 else "int8"
        return GroupedForm(kind, self.shape[1] // self.num_groups, self.zeros is not None)

    def grouped_numbers(self) -> GroupedNumbers:
        """All numbers in the form `grouped`. Raises OSError."""
        outputs = self.outputs
        if outputs is None:
            outputs = np.arange(self.shape[0])
        return grouped_integers(*self._reader()(outputs), self.bits)

    @property
    def input_order(self) -> np.ndarray | None:
        """The input that each row of the packed matrix multiplies; None if they are in order."""
        if self.groups is None:
            return None
        return np.argsort(self.groups, kind="stable").astype(np.int32)

    def blocks(self, num_blocks: int, width: int) -> Iterator[tuple[int, PackedBits]]:
        """Yield some packed blocks after the number of the first one. Outputs beyond the stored ones are zeros.

        Raises:
            OSError: the file cannot be read.
        """
        read = self._reader()
        order = self.input_order
        each = max(1, STRIPE_BYTES // (self.shape[1] * width)) * width
        for start in range(0, num_blocks * width, each):
            count = min(each, num_blocks * width - start)
            numbers, scales, zeros = read(self._stored_outputs(start, start + count))
            if order is not None:
                numbers = numbers[:, order]
            minima = None
            if zeros is not None:
                minima = _with_rows(scales * zeros, count)
            parts = BitsParts(_with_rows(numbers, count), _with_rows(scales, count), minima)
            yield start // width, packed_parts(parts, self.bits, width)

    def _stored_outputs(self, start: int, stop: int) -> np.ndarray:
        """The stored outputs that some outputs of the parameter come from; fewer at the end of a padded table."""
        if self.outputs is not None:
            return self.outputs[start:stop]
        return np.arange(min(start, self.shape[0]), min(stop, self.shape[0]))

    def _reader(self) -> Callable[[np.ndarray], _Columns]:
        """A function for the columns of some outputs. All rows are read once. Raises OSError."""
        numbers = self._unpacked(0, self.num_rows)
        scales = self.scales.all().astype(np.float32)
        zeros = None
        if self.zeros is not None:
            zeros = self.zero_points(0, self.num_groups)

        def columns(outputs: np.ndarray) -> _Columns:
            of_outputs = None if zeros is None else zeros[:, outputs].T
            return _Columns(numbers[:, outputs].T, scales[:, outputs].T, of_outputs)

        return columns

    def _unpacked(self, start: int, stop: int) -> np.ndarray:
        """Some rows as numbers from 0 on, uint8 [rows, columns]. Raises OSError."""
        raise NotImplementedError

    def zero_points(self, start: int, stop: int) -> np.ndarray:
        """The zero points of some rows of scales, in float32. Raises OSError."""
        raise NotImplementedError

    def _factors(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | float]:
        """The scales and the zero points of some rows, in float32. Raises OSError."""
        groups = self.group_of_input[start:stop]
        first = int(groups.min())
        last = int(groups.max()) + 1
        scales = self.scales.rows(first, last).astype(np.float32)[groups - first]
        if self.zeros is None:
            return scales, self.middle
        return scales, self.zero_points(first, last)[groups - first]

    @property
    def middle(self) -> float:
        """The zero point of numbers without stored ones."""
        return float(1 << (self.bits - 1))

    @cached_property
    def group_of_input(self) -> np.ndarray:
        """The group of each input."""
        if self.groups is not None:
            return self.groups
        inputs = self.shape[1]
        return np.arange(inputs) // (inputs // self.num_groups)


class GptqMatrix(IntegerMatrix):
    """Words of some inputs of an output, int32 [I * bits / 32, O]; zero points are in words of outputs."""

    def _unpacked(self, start: int, stop: int) -> np.ndarray:
        each = WORD_BITS // self.bits
        first = start // each
        words = self.numbers.rows(first, -(-stop // each))
        numbers = unpacked(words, self.bits).swapaxes(1, 2).reshape(-1, words.shape[1])
        return numbers[start - first * each : stop - first * each]

    def zero_points(self, start: int, stop: int) -> np.ndarray:
        assert self.zeros is not None, "checked by the caller"
        words = self.zeros.rows(start, stop)
        zeros = unpacked(words, self.bits).reshape(len(words), -1)
        return zeros.astype(np.float32) + np.float32(self.zero_offset)


class AwqMatrix(IntegerMatrix):
    """Words of eight outputs of an input, int32 [I, O / 8]; zero points are in such words too."""

    def _unpacked(self, start: int, stop: int) -> np.ndarray:
        return _awq_numbers(self.numbers.rows(start, stop))

    def zero_points(self, start: int, stop: int) -> np.ndarray:
        assert self.zeros is not None, "checked by the caller"
        return _awq_numbers(self.zeros.rows(start, stop)).astype(np.float32)


class CompressedMatrix(IntegerMatrix):
    """Words of some inputs, int32 [O, I * bits / 32]; scales are [O, G], and zero points in words of outputs [., G]."""

    @property
    def is_turned(self) -> bool:
        return False

    @property
    def num_groups(self) -> int:
        return self.scales.tensor.shape[1]

    def _reader(self) -> Callable[[np.ndarray], _Columns]:
        def columns(outputs: np.ndarray) -> _Columns:
            first = int(outputs.min(initial=self.shape[0]))
            last = int(outputs.max(initial=first - 1)) + 1
            own = outputs - first
            zeros = None
            if self.zeros is not None:
                zeros = self.zero_points(first, last)[own]
            scales = self.scales.rows(first, last).astype(np.float32)
            return _Columns(self._unpacked(first, last)[own], scales[own], zeros)

        return columns

    def _unpacked(self, start: int, stop: int) -> np.ndarray:
        words = self.numbers.rows(start, stop)
        return unpacked(words, self.bits).reshape(len(words), -1)[:, : self.shape[1]]

    def zero_points(self, start: int, stop: int) -> np.ndarray:
        assert self.zeros is not None, "checked by the caller"
        each = WORD_BITS // self.bits
        first = start // each
        words = self.zeros.rows(first, -(-stop // each))
        zeros = unpacked(words, self.bits).swapaxes(1, 2).reshape(-1, words.shape[1])
        return zeros[start - first * each : stop - first * each].astype(np.float32)

    def _factors(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | float]:
        scales = self.scales.rows(start, stop).astype(np.float32)[:, self.group_of_input]
        if self.zeros is None:
            return scales, self.middle
        return scales, self.zero_points(start, stop)[:, self.group_of_input]


class ByteMatrix(CompressedMatrix):
    """Signed integers of 8 bits, int8 [O, I] (compressed-tensors, `int-quantized`)."""

    def _unpacked(self, start: int, stop: int) -> np.ndarray:
        return self.numbers.rows(start, stop).view(np.uint8) ^ np.uint8(128)


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """The numbers of words, the lowest bits first.

    Args:
        words: int32 [rows, columns].
        bits: the size of a number, 4 or 8.

    Returns:
        uint8 [rows, columns, numbers of a word].
    """
    stored = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return stored
    numbers = np.empty((*words.shape, 4, 2), np.uint8)
    numbers[..., 0] = stored & 15
    numbers[..., 1] = stored >> 4
    return numbers.reshape(*words.shape, 8)


def _awq_numbers(words: np.ndarray) -> np.ndarray:
    """The numbers of words [rows, O / 8], in the order of outputs."""
    return unpacked(words, 4)[..., _AWQ_ORDER].reshape(len(words), -1)


def _with_rows(values: np.ndarray, count: int) -> np.ndarray:
    """The values with rows of zeros at the end, if there are fewer."""
    missing = count - len(values)
    if missing == 0:
        return np.ascontiguousarray(values)
    return np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])
