"""Leaves that are matrices of rows: those of safetensors and GGUF files, and dequantised ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from orca_jax.model.families.base import Weight
from orca_jax.model.files.stripes import (
    STRIPE_BYTES,
    CopyTarget,
    PackedTarget,
    TensorRows,
    as_range,
    copy,
)
from orca_jax.model.leaves.base import OfMatrix, ShardPart
from orca_jax.model.parameters import (
    copied_columns,
    head_dim_of,
    is_of_vocabulary,
    num_copies,
    stored_shape,
)
from orca_jax.values.config import ModelConfig


@dataclass(frozen=True)
class RowLeaf(OfMatrix):
    """A matrix in a file."""

    matrix: TensorRows

    def memory_for(self, places: Sequence[CopyTarget | PackedTarget]) -> int:
        """Return the bytes of a stripe."""
        return max(STRIPE_BYTES, self.matrix.step)

    def read_into(self, places: Sequence[CopyTarget | PackedTarget]) -> int:
        """Fill all places; each needed row is read once. Raises OSError."""
        return copy(self.matrix, places)


@dataclass(frozen=True)
class RowSource:
    """The matrices of a parameter.

    Attributes:
        weight: the row of the family's table.
        matrices: those of the layers and experts in the parameter, in order; or a single one.
        num_stacked: first axes of the parameter that number the matrices, such as 2 for layers and experts.
        config: the configuration as the mesh holds the model.
        packed_width: columns of a block of a packed matrix, whose columns are rows of the files; 0 for plain ones.
    """

    weight: Weight
    matrices: tuple[TensorRows, ...]
    num_stacked: int
    config: ModelConfig
    packed_width: int = 0

    @cached_property
    def leaves(self) -> tuple[RowLeaf, ...]:
        """The matrices as leaves of `fill`."""
        return tuple(map(RowLeaf, self.matrices))

    def place(self, number: int, part: ShardPart) -> CopyTarget | PackedTarget:
        """The memory that a matrix fills, and its rows and columns. Rows beyond the stored ones are zeros."""
        values, bounds, shape = part
        weight = self.weight
        if width := self.packed_width:
            blocks, lines, _ = bounds
            each = shape[-1] // width
            rows, outputs = (
                range(size * own.start, size * own.stop)
                for size, own in ((each, lines), (width, blocks))
            )
            return PackedTarget(values, rows, outputs, width)
        columns = self._columns(bounds[-1])
        if len(bounds) == 1:
            if is_of_vocabulary(weight.path):
                start = bounds[0].start
                columns = range(start, max(start, min(bounds[0].stop, self.config.vocab_size)))
                values[len(columns) :] = 0
                values = values[: len(columns)]
            return CopyTarget(values[None], range(1), columns, is_transposed=False)
        stored = stored_shape(weight.path, shape, self.config)[0]
        start = min(bounds[0].start, stored)
        stop = min(bounds[0].stop, stored)
        values[stop - start :] = 0
        rows = range(start + weight.first_row, stop + weight.first_row)
        is_transposed = weight.transpose != self.matrices[number].is_turned
        return CopyTarget(values[: stop - start], rows, columns, is_transposed=is_transposed)

    def _columns(self, wanted: range) -> range | np.ndarray:
        """The columns of a matrix, after a transposition, that the columns `wanted` of a parameter come from."""
        weight = self.weight
        copies = num_copies(weight.path, self.config)
        if copies == 1 and weight.part is None:
            return wanted
        columns = np.arange(wanted.start, wanted.stop)
        if copies != 1:
            columns = copied_columns(wanted, copies, head_dim_of(weight.path, self.config))
        return as_range(columns if weight.part is None else weight.part.column(columns))
