"""Matrices of integers in 4 or 8 bits: an entry is `scale * (number - zero point)`, with both for a group of inputs.

`words.py` has the orders of numbers in files.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from orca_jax.kernels.native import PackedBits
from orca_jax.model.files.safetensors import StoredTensor
from orca_jax.model.matrices.bits_shapes import BitsForm
from orca_jax.model.matrices.blocks import BitsParts, packed_stripes
from orca_jax.model.matrices.grouped import GroupedForm, GroupedNumbers, grouped_integers
from orca_jax.model.published.matrix import PublishedMatrix


class MatrixColumns(NamedTuple):
    """Numbers uint8 [O, I], scales and zero points [O, G] of some outputs."""

    numbers: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None


@dataclass(frozen=True, eq=False, kw_only=True)
class IntegerMatrix(PublishedMatrix):
    """A matrix of integers; its numbers are words, with scales of each group and output.

    Attributes:
        bits: the size of a number, 4 or 8.
        zeros: the zero points of each group and output in words; None: the middle of the numbers.
        zero_offset: added to stored zero points.
        groups: the group of each input; None: they are in order.
    """

    bits: int
    zeros: StoredTensor | None = None
    zero_offset: int = 0
    groups: np.ndarray | None = None

    @property
    def is_turned(self) -> bool:
        return True

    @property
    def num_groups(self) -> int:
        return self.scales.shape[0]

    def read_into(self, start: int, values: np.ndarray) -> None:
        """Read the rows from `start` on, dequantised, into a contiguous matrix. Raises OSError."""
        stop = start + len(values)
        scales, zeros = self.factors_of(start, stop)
        np.subtract(self.rows_from(start, stop), zeros, out=values, dtype=np.float32)
        values *= scales

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
        """The form of the numbers for products of XLA; None if groups have different sizes."""
        if self.form is None:
            return None
        return GroupedForm(
            "int4" if self.bits == 4 else "int8",
            self.shape[1] // self.num_groups,
            has_zero=self.zeros is not None,
            has_order=self.groups is not None,
        )

    def grouped_numbers(self) -> GroupedNumbers:
        """All numbers in the form `grouped`. Raises OSError."""
        numbers, scales, zeros = self.reader()(self.stored)
        order = self.input_order
        if order is not None:
            numbers = numbers[:, order]
        return grouped_integers(numbers, scales, zeros, self.bits)._replace(order=order)

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
        assert self.form is not None, "a matrix without a form has no blocks"
        read = self.reader()
        order = self.input_order

        def parts(outputs: np.ndarray) -> BitsParts:
            numbers, scales, zeros = read(outputs)
            if order is not None:
                numbers = numbers[:, order]
            return BitsParts(numbers, scales, None if zeros is None else scales * zeros)

        return packed_stripes(parts, self.stored, num_blocks, width, self.form, self.shape[1])

    def reader(self) -> Callable[[np.ndarray], MatrixColumns]:
        """A function for the columns of some outputs. All rows are read once. Raises OSError."""
        numbers = self.rows_from(0, self.num_rows)
        scales = self.scales.all().astype(np.float32)
        zeros = None
        if self.zeros is not None:
            zeros = self.zero_points(0, self.num_groups)

        def columns(outputs: np.ndarray) -> MatrixColumns:
            of_outputs = None if zeros is None else zeros[:, outputs].T
            return MatrixColumns(numbers[:, outputs].T, scales[:, outputs].T, of_outputs)

        return columns

    def rows_from(self, start: int, stop: int) -> np.ndarray:
        """Some rows as numbers from 0 on, uint8 [rows, columns]. Raises OSError."""
        raise NotImplementedError

    def zero_points(self, start: int, stop: int) -> np.ndarray:
        """The zero points of some rows of scales, in float32. Raises OSError."""
        raise NotImplementedError

    def factors_of(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray | float]:
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
