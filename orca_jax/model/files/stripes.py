"""Copy matrices from files into arrays in memory, a stripe of rows at a time.

A stripe fits into the caches of a processor, so that a transposition or a change of type costs no further pass over
memory. Beside the result, a copy holds a stripe or two. Vectors are matrices of one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from orca_jax.model.files.finite import PART_BYTES, num_not_finite
from orca_jax.model.files.opened import OpenFile

STRIPE_BYTES = PART_BYTES
_TRANSPOSED_ROWS = 64  # at once, so that each row of the result gets whole cache lines
# bytes between rows that are transposed: a distance of a power of two would use few lines of a
# cache
_PADDING = 64
_ALIGNMENT = 64  # bytes; JAX uses such memory of a host as it is

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
"""Types of tensors in files, by their names in safetensors."""

STORED_TYPES: dict[str, np.dtype] = {
    **DTYPES,
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}
"""The same, with the types that are parts of quantised weights alone."""


@runtime_checkable
class TensorRows(Protocol):
    """A matrix in a file.

    Attributes:
        key: name of the tensor.
        num_rows: rows of the matrix.
        num_columns: columns of the matrix.
        dtype: the type of its values.
        row_bytes: bytes of a row in the file.
        step: bytes that are best read at once.
        order: sorts matrices by their places in the files.
        is_turned: rows and columns are those of the transposed tensor that a family's table of weights names.
    """

    @property
    def key(self) -> str: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_columns(self) -> int: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def order(self) -> tuple[int, int]: ...
    @property
    def is_turned(self) -> bool: ...

    def read_into(self, start: int, values: np.ndarray) -> None:
        """Read the rows from `start` on into a contiguous matrix of this type. Raises OSError."""
        ...


@dataclass(frozen=True)
class FileMatrix:
    """A matrix stored row by row from a byte of an open file on."""

    key: str
    num_rows: int
    num_columns: int
    dtype: np.dtype
    file: OpenFile
    begin: int

    @property
    def row_bytes(self) -> int:
        return self.num_columns * self.dtype.itemsize

    @property
    def step(self) -> int:
        return self.file.step

    @property
    def order(self) -> tuple[int, int]:
        return self.file.number, self.begin

    @property
    def is_turned(self) -> bool:
        return False

    def read_into(self, start: int, values: np.ndarray) -> None:
        """Read the rows from `start` on into a contiguous matrix."""
        self.file.read_into(self.begin + start * self.row_bytes, values)


@dataclass(frozen=True)
class CopyTarget:
    """The place of a part of a file's matrix in memory.

    `values` is a matrix, or a part of one, filled from the rows `rows` and the columns `columns` of the file's matrix;
    if `is_transposed`, from the rows `columns` and the columns `rows`.
    """

    values: np.ndarray
    rows: range
    columns: range | np.ndarray
    is_transposed: bool

    @property
    def file_rows(self) -> range:
        """The needed rows of the file, from the first to the last one."""
        needed = self.columns if self.is_transposed else self.rows
        if isinstance(needed, range):
            return needed
        return range(int(needed.min()), int(needed.max()) + 1)

    def is_direct(self, source: TensorRows) -> bool:
        """True if the rows in the file are those in memory, byte by byte."""
        if (
            self.is_transposed
            or not isinstance(self.columns, range)
            or self.columns != range(source.num_columns)
        ):
            return False
        return self.values.dtype == source.dtype and self.values.flags.c_contiguous

    def scratch(self) -> np.ndarray:
        """Memory for `take_stripe`: rows of this type, with padding, if they are to be transposed."""
        width = len(self.rows) + _PADDING // self.values.itemsize
        return np.empty((_TRANSPOSED_ROWS if self.is_transposed else 0, width), self.values.dtype)

    def take_stripe(self, start: int, stripe: np.ndarray, scratch: np.ndarray) -> None:
        """Copy what is needed of the rows from `start` on."""
        stop = start + len(stripe)
        if not self.is_transposed:
            first = max(start, self.rows.start)
            last = min(stop, self.rows.stop)
            if first < last:
                part = stripe[first - start : last - start, _index(self.columns)]
                self.values[first - self.rows.start : last - self.rows.start] = part
        elif isinstance(self.columns, range):
            first = max(start, self.columns.start)
            last = min(stop, self.columns.stop)
            part = stripe[
                first - start : max(first, last) - start, self.rows.start : self.rows.stop
            ]
            target = self.values[:, first - self.columns.start :]
            for row in range(0, len(part), _TRANSPOSED_ROWS):
                block = scratch[: min(_TRANSPOSED_ROWS, len(part) - row), : len(self.rows)]
                block[:] = part[row : row + len(block)]
                target[:, row : row + len(block)] = block.T
        else:
            wanted = np.flatnonzero((self.columns >= start) & (self.columns < stop))
            part = stripe[self.columns[wanted] - start, self.rows.start : self.rows.stop]
            self.values[:, wanted] = part.T


@dataclass(frozen=True)
class PackedTarget:
    """The place of a part of a packed matrix in memory, whose columns are rows of the file's matrix.

    `values` are blocks of `width` columns in the form of `kernels.native.pack`, filled from the rows `columns` and the
    columns `rows` of the file's matrix.
    """

    values: np.ndarray
    rows: range
    columns: range
    width: int

    @property
    def file_rows(self) -> range:
        """The needed rows of the file."""
        return self.columns

    def is_direct(self, source: TensorRows) -> bool:
        """False: the numbers change their order."""
        return False

    def scratch(self) -> np.ndarray:
        """Memory for `take_stripe`: the columns of a block, with padding."""
        return np.empty(
            (self.width, len(self.rows) + _PADDING // self.values.itemsize), self.values.dtype
        )

    def take_stripe(self, start: int, stripe: np.ndarray, scratch: np.ndarray) -> None:
        """Copy what is needed of the rows from `start` on. The inputs of a column in four bytes move together."""
        blocks = self.values.view(np.uint32)
        fours = scratch.view(np.uint32)[:, : self.values.shape[1]]
        first = max(start, self.columns.start)
        last = min(start + len(stripe), self.columns.stop)
        assert (first - self.columns.start) % self.width == 0, "stripes have whole blocks"
        for row in range(first, last, self.width):
            scratch[:, : len(self.rows)] = stripe[row - start :, self.rows.start : self.rows.stop][
                : self.width
            ]
            blocks[(row - self.columns.start) // self.width] = fours.T


def copy(source: TensorRows, places: Sequence[CopyTarget | PackedTarget]) -> int:
    """Fill all places from one matrix; each of its rows that is needed is read once.

    Returns:
        the number of read values that are NaN or infinite.

    Raises:
        OSError: the file cannot be read.
    """
    places = [place for place in places if place.values.size]
    if not places:
        return 0
    if len(places) == 1 and places[0].is_direct(source):
        return _read_directly(source, places[0].rows.start, places[0].values)
    start = min(place.file_rows.start for place in places)
    stop = max(place.file_rows.stop for place in places)
    step = _whole_rows(source, STRIPE_BYTES)
    read_step = max(step, _whole_rows(source, source.step) // step * step)
    count = 0
    memory = np.empty((min(read_step, stop - start), source.num_columns), source.dtype)
    rows_read = memory
    if all(place.values.dtype == source.dtype for place in places):
        # NumPy moves integers faster than the types that ml_dtypes adds to it.
        bits = np.dtype(f"u{source.dtype.itemsize}")
        rows_read = memory.view(bits)
        places = [replace(place, values=place.values.view(bits)) for place in places]
    scratch = [place.scratch() for place in places]
    for first in range(start, stop, read_step):
        source.read_into(first, memory[: stop - first])
        for row in range(first, min(stop, first + read_step), step):
            stripe = slice(row - first, min(row - first + step, stop - first))
            count += num_not_finite(memory[stripe])
            for place, own in zip(places, scratch, strict=True):
                place.take_stripe(row, rows_read[stripe], own)
    return count


def _whole_rows(source: TensorRows, num_bytes: int) -> int:
    """The rows of about so many bytes, a multiple of those that are transposed at once."""
    return max(1, num_bytes // (source.row_bytes * _TRANSPOSED_ROWS)) * _TRANSPOSED_ROWS


def _read_directly(source: TensorRows, start: int, values: np.ndarray) -> int:
    """Read rows to their place, and count those that are not finite while they are in the caches."""
    step = max(1, max(STRIPE_BYTES, source.step) // source.row_bytes)
    each = max(1, STRIPE_BYTES // source.row_bytes)
    count = 0
    for row in range(0, len(values), step):
        part = values[row : row + step]
        source.read_into(start + row, part)
        count += sum([num_not_finite(part[at : at + each]) for at in range(0, len(part), each)])
    return count


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array without values in memory that JAX can use as it is on a CPU."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def as_range(numbers: np.ndarray) -> range | np.ndarray:
    """The same numbers as a range if each is the one before plus 1."""
    is_plain = (
        len(numbers) > 0
        and numbers[-1] - numbers[0] + 1 == len(numbers)
        and bool((np.diff(numbers) == 1).all())
    )
    if not is_plain:
        return numbers
    return range(int(numbers[0]), int(numbers[-1]) + 1)


def _index(numbers: range | np.ndarray) -> slice | np.ndarray:
    if not isinstance(numbers, range):
        return numbers
    return slice(numbers.start, numbers.stop)
