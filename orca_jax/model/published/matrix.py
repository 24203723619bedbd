"""Published matrices: their tensors in open files, their sizes, and the outputs of a parameter."""

from dataclasses import dataclass

import numpy as np

from orca_jax.model.files.safetensors import StoredTensor


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
    numbers: StoredTensor
    scales: StoredTensor
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
    def step(self) -> int:
        return self.numbers.file.step

    @property
    def order(self) -> tuple[int, int]:
        return self.numbers.file.number, self.numbers.begin

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
