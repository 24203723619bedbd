"""Matrices of floating-point numbers in 8 or 4 bits with scales, as rows of dequantised numbers in float32.

    FloatMatrix  numbers in e4m3; a scale for the matrix, an output, a group of inputs, or a block such as 128 x 128
    Fp4Matrix    two numbers in e2m1 in a byte; a scale in e4m3 for 16 inputs, and one for the matrix (NVFP4)

Their rows are outputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from orca_jax.kernels.native import PackedBits
from orca_jax.model.files.expert_stacks import E2M1
from orca_jax.model.matrices.grouped import GroupedForm, GroupedNumbers
from orca_jax.model.published.matrix import PublishedMatrix, TensorPart

FP4_GROUP = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class FloatMatrix(PublishedMatrix):
    """A matrix of numbers in a byte each, [O, I].

    Its scales are those of blocks of equal sizes, except the last ones of a row or column: a matrix, a vector of
    outputs, or one number.

    Attributes:
        block: outputs and inputs of a block.
    """

    block: tuple[int, int]

    @property
    def form(self) -> None:
        """The library in C multiplies integers alone."""
        return None

    @property
    def input_order(self) -> None:
        """The inputs are in order."""
        return None

    def blocks(self, num_blocks: int, width: int) -> Iterator[tuple[int, PackedBits]]:
        """There are no packed blocks without a form."""
        raise AssertionError("a matrix without a form has no blocks")

    @property
    def grouped(self) -> GroupedForm | None:
        """The form of the numbers for products of XLA; None if the last block of a row is smaller."""
        group = self.block[1]
        if self.shape[1] % group:
            return None
        return GroupedForm("fp8" if self.numbers.tensor.dtype == "F8_E4M3" else "int8", group)

    def grouped_numbers(self) -> GroupedNumbers:
        """All numbers in the form `grouped`. Raises OSError."""
        stored = self.scales.all().reshape(-1, self.shape[1] // self.block[1])
        scales = stored[np.arange(self.shape[0]) // self.block[0]].astype(np.float32)
        numbers = self.numbers.all()
        if self.outputs is not None:
            numbers = numbers[self.outputs]
            scales = scales[self.outputs]
        return GroupedNumbers(numbers.T, scales.T)

    def read_into(self, start: int, values: np.ndarray) -> None:
        """Read the rows from `start` on, dequantised, into a contiguous matrix. Raises OSError."""
        stop = start + len(values)
        np.multiply(
            self._numbers(start, stop), self._scales(start, stop), out=values, dtype=np.float32
        )

    def _numbers(self, start: int, stop: int) -> np.ndarray:
        return self.numbers.rows(start, stop).astype(np.float32)

    def _scales(self, start: int, stop: int) -> np.ndarray:
        """The scales of each entry of some rows, or of each row."""
        outputs, inputs = self.block
        first = start // outputs
        last = -(-stop // outputs)
        stored = self.scales.rows(first, last) if self.scales.tensor.shape else self.scales.all()
        scales = stored.reshape(last - first, -1).astype(np.float32)
        of_rows = scales[np.arange(start, stop) // outputs - first]
        if of_rows.shape[1] == 1:
            return of_rows
        return of_rows[:, np.arange(self.shape[1]) // inputs]


@dataclass(frozen=True, eq=False, kw_only=True)
class Fp4Matrix(FloatMatrix):
    """A matrix in NVFP4. Its bytes have an even input in the low half and the next one in the high half.

    Attributes:
        whole: the scale of the matrix, float32.
        is_divisor: the scale of the matrix divides.
    """

    whole: TensorPart
    is_divisor: bool

    @property
    def grouped(self) -> None:
        """There is no product of numbers in e2m1."""
        return None

    def _numbers(self, start: int, stop: int) -> np.ndarray:
        stored = self.numbers.rows(start, stop)
        numbers = np.empty((*stored.shape, 2), np.float32)
        numbers[..., 0] = E2M1[stored & 15]
        numbers[..., 1] = E2M1[stored >> 4]
        return numbers.reshape(len(stored), -1)

    def _scales(self, start: int, stop: int) -> np.ndarray:
        scales = self.scales.rows(start, stop).astype(np.float32)
        whole = self.whole.all().reshape(()).astype(np.float32)
        scales = scales / whole if self.is_divisor else scales * whole
        return np.repeat(scales, FP4_GROUP, axis=1)
