"""Published matrices: their tensors in open files, their sizes, and the outputs of a parameter."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orca_jax.model.files.safetensors import StoredTensor
from orca_jax.model.files.stripes import STORED_TYPES, read_exactly


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


@dataclass(frozen=True, eq=False, kw_only=True)
class PublishedMatrix:
    """A matrix in an open file, as rows of dequantised numbers in float32.

    Attributes:
        key: name of the plain tensor.
        shape: outputs and inputs.
        numbers: the tensor of its numbers.
        scales: the tensor of their factors.
        outputs: the stored output of each output of a parameter, for the bits alone; None: all in order.
    """

    key: str
    shape: tuple[int, int]
    numbers: TensorPart
    scales: TensorPart
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
        return False

    @property
    def stored(self) -> np.ndarray:
        """The stored output of each output of the parameter."""
        if self.outputs is None:
            return np.arange(self.shape[0])
        return self.outputs

    def fills(self, shape: tuple[int, ...], name: str) -> bool:
        """True unless a matrix of this shape has copies of some outputs. A table may have more rows, for padding."""
        return name == "table" or shape[-1] == len(self.stored)
