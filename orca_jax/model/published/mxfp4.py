"""Matrices of experts in MXFP4, with the bits of their files."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from orca_jax.kernels.native import PackedBits
from orca_jax.model.files.expert_stacks import MXFP4_GROUP, Mxfp4Matrix, e2m1_numbers
from orca_jax.model.leaves.base import OfMatrix
from orca_jax.model.matrices.bits_shapes import BitsForm
from orca_jax.model.matrices.blocks import BitsParts, of_ranges, packed_stripes
from orca_jax.model.matrices.grouped import GroupedForm, GroupedNumbers
from orca_jax.model.published.numbers import doubled


@dataclass(frozen=True, eq=False)
class Mxfp4Bits(OfMatrix):
    """A matrix of an expert. Twice its numbers are integers from -12 to 12: 5 bits hold them for the library.

    Attributes:
        matrix: the matrix in an open file; its rows are outputs.
        outputs: the stored output of each output of a parameter; None: all in order.
    """

    matrix: Mxfp4Matrix
    outputs: np.ndarray | None

    @property
    def form(self) -> BitsForm:
        """The form of its numbers in memory."""
        return BitsForm(5, is_wide=True)

    @property
    def _stored(self) -> np.ndarray:
        if self.outputs is None:
            return np.arange(self.matrix.num_rows)
        return self.outputs

    def fills(self, shape: tuple[int, ...], name: str) -> bool:
        """True unless a matrix of this shape has copies of some outputs."""
        return shape[-1] == len(self._stored)

    def blocks(self, num_blocks: int, width: int) -> Iterator[tuple[int, PackedBits]]:
        """Yield some packed blocks after the number of the first one. Raises OSError."""
        inputs = self.matrix.num_columns
        read = of_ranges(self._parts)
        return packed_stripes(read, self._stored, num_blocks, width, self.form, inputs)

    @property
    def grouped(self) -> GroupedForm:
        """The bytes of the file, and half of the scales. Scales are powers of two."""
        return GroupedForm("fp4", MXFP4_GROUP, scale="bfloat16")

    def grouped_numbers(self) -> GroupedNumbers:
        """All numbers in the form `grouped`. Raises OSError."""
        packed, powers = self.matrix.read_codes(0, self.matrix.num_rows)
        codes = packed.reshape(len(packed), -1).view(np.int8)
        scales = np.ldexp(np.float32(0.5), powers)
        return GroupedNumbers(codes[self._stored].T, scales[self._stored].T)

    @property
    def input_order(self) -> None:
        """The inputs are in order."""
        return None

    def _parts(self, start: int, stop: int) -> BitsParts:
        packed, powers = self.matrix.read_codes(start, stop)
        codes = doubled(e2m1_numbers(packed), self.form).reshape(len(packed), -1)
        return BitsParts(codes, np.ldexp(np.float32(0.5), powers))
