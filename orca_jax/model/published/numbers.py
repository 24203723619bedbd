"""Matrices of floating-point numbers in 8 or 4 bits with scales: dequantised rows, and numbers for the library in C.

    FloatMatrix  numbers in e4m3; a scale for the matrix, an output, a group of inputs, or a block such as 128 x 128
    Fp4Matrix    two numbers in e2m1 in a byte; a scale in e4m3 for 16 inputs, and one for the matrix (NVFP4)

Their rows are outputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from orca_jax.kernels.native import PackedBits
from orca_jax.model.files.expert_stacks import e2m1_numbers
from orca_jax.model.files.safetensors import StoredTensor
from orca_jax.model.matrices.bits_shapes import BitsForm
from orca_jax.model.matrices.blocks import BitsParts, of_ranges, packed_stripes
from orca_jax.model.matrices.grouped import GroupedForm, GroupedNumbers, kept_group
from orca_jax.model.published.matrix import PublishedMatrix

FP4_GROUP = 16


def doubled(numbers: np.ndarray, form: BitsForm) -> np.ndarray:
    """Twice the numbers of e2m1, which are integers from -12 to 12, as unsigned ones of a form."""
    middle = 1 << (form.bits - 1)
    return (2 * numbers + middle).astype(np.uint8)


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
    def form(self) -> BitsForm | None:
        """The form of the numbers in memory; None if there is none."""
        if self._group is None:
            return None
        return BitsForm(8, group=self._group, is_wide=True, is_float=self._is_float)

    @property
    def input_order(self) -> None:
        """The inputs are in order."""
        return None

    def blocks(self, num_blocks: int, width: int) -> Iterator[tuple[int, PackedBits]]:
        """Yield some packed blocks after the number of the first one. Outputs beyond the stored ones are zeros.

        Raises:
            OSError: the file cannot be read.
        """
        assert self.form is not None, "a matrix without a form has no blocks"
        read = of_ranges(self._parts)
        return packed_stripes(read, self.stored, num_blocks, width, self.form, self.shape[1])

    def _parts(self, start: int, stop: int) -> BitsParts:
        """The numbers of some outputs as the library has them. NaN makes the scale of its group NaN. Raises OSError."""
        codes = self.numbers.rows(start, stop).view(np.uint8)
        scales = self._of_groups(self._factors(start, stop))
        if not self._is_float:
            return BitsParts(codes ^ np.uint8(0x80), scales)
        is_nan = (codes & np.uint8(0x7F)) == 0x7F
        if is_nan.any():
            of_groups = is_nan.reshape(len(codes), scales.shape[1], -1).any(axis=2)
            scales = np.where(of_groups, np.float32(np.nan), scales)
        return BitsParts(codes, scales)

    @property
    def _is_float(self) -> bool:
        return self.numbers.dtype == "F8_E4M3"

    @property
    def _group(self) -> int | None:
        """Inputs of a group, a block or a part of one; None if there is none."""
        return kept_group(self.block[1], self.shape[1])

    def _of_groups(self, scales: np.ndarray) -> np.ndarray:
        """The scale of each group, from the scales of blocks [O, B]."""
        assert self._group is not None, "a matrix without groups has no form"
        begins = np.arange(0, self.shape[1], self._group)
        return scales[:, begins // self.block[1]]

    @property
    def grouped(self) -> GroupedForm | None:
        """The form of the numbers for products of XLA; None if there is none."""
        if self._group is None:
            return None
        return GroupedForm("fp8" if self._is_float else "int8", self._group)

    def grouped_numbers(self) -> GroupedNumbers:
        """All numbers in the form `grouped`. Raises OSError."""
        scales = self._of_groups(self._factors(0, self.shape[0]))
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
        """The scales of each entry of some rows, or of each row. Raises OSError."""
        of_rows = self._factors(start, stop)
        if of_rows.shape[1] == 1:
            return of_rows
        return of_rows[:, np.arange(self.shape[1]) // self.block[1]]

    def _factors(self, start: int, stop: int) -> np.ndarray:
        """The scales of the groups of some rows, float32 [O, G]. Raises OSError."""
        outputs = self.block[0]
        first = start // outputs
        last = -(-stop // outputs)
        stored = self.scales.rows(first, last) if self.scales.shape else self.scales.all()
        scales = stored.reshape(last - first, -1).astype(np.float32)
        return scales[np.arange(start, stop) // outputs - first]


@dataclass(frozen=True, eq=False, kw_only=True)
class Fp4Matrix(FloatMatrix):
    """A matrix in NVFP4. Its bytes have an even input in the low half and the next one in the high half.

    Attributes:
        whole: the scale of the matrix, float32.
        is_divisor: the scale of the matrix divides.
    """

    whole: StoredTensor
    is_divisor: bool

    @property
    def form(self) -> BitsForm:
        """Twice the numbers are integers from -12 to 12, which 6 bits hold in groups of 16."""
        return BitsForm(6, group=FP4_GROUP, is_wide=True)

    def _parts(self, start: int, stop: int) -> BitsParts:
        codes = doubled(self._numbers(start, stop), self.form)
        return BitsParts(codes, self._factors(start, stop) / 2)

    @property
    def grouped(self) -> GroupedForm:
        """The bytes of the file, and half of the scales."""
        return GroupedForm("fp4", FP4_GROUP)

    def grouped_numbers(self) -> GroupedNumbers:
        """All numbers in the form `grouped`. Raises OSError."""
        found = super().grouped_numbers()
        return found._replace(values=found.values.view(np.int8), scale=found.scale / 2)

    def _numbers(self, start: int, stop: int) -> np.ndarray:
        return e2m1_numbers(self.numbers.rows(start, stop))

    def _factors(self, start: int, stop: int) -> np.ndarray:
        scales = self.scales.rows(start, stop).astype(np.float32)
        whole = self.whole.all().reshape(()).astype(np.float32)
        if self.is_divisor:
            return scales / whole
        return scales * whole
