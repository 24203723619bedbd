"""The host's copy of the state of each row between iterations. Plans carry only the changes."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from orca_jax.cache_spec import NO_BLOCK
from orca_jax.exec.sampling.fields import COLUMNS
from orca_jax.step import Member, RowSampling


class VectorSums:
    """Sums of hidden vectors, for the means of requests whose tokens are computed in several launches."""

    def __init__(self) -> None:
        self._sums: dict[int, NDArray[np.float64]] = {}

    def add(self, row: int, position: int, vectors: NDArray[np.floating]) -> NDArray[np.float64]:
        """Add the vectors of the tokens from `position` on, one by one, and return the sum from position 0 on.

        The sum of float64 in the order of the tokens does not depend on the launches.
        """
        before = np.zeros((1, vectors.shape[1])) if position == 0 else self._sums[row][None]
        self._sums[row] = total = np.cumsum(np.concatenate([before, vectors], dtype=np.float64), axis=0)[-1]
        return total

    def take(self, row: int) -> None:
        """Forget the sum of a row."""
        del self._sums[row]


class RowTable:
    """Blocks of each row, and the sampling fields of its request; row `num_rows` is an extra one without a request.

    This last row is neutral: greedy, without penalties or biases.

    Attributes:
        blocks: [groups, rows, pages] of the longest request; entries that a row never had or gave back have no meaning.
    """

    def __init__(self, num_rows: int, num_pages: int, num_groups: int = 1) -> None:
        rows = num_rows + 1
        self.num_rows = num_rows
        self.blocks = np.zeros((num_groups, rows, num_pages), np.int32)
        self.sampling: dict[str, NDArray[np.float32] | NDArray[np.int32]] = {
            name: np.full((rows, *column.shape), column.neutral, column.dtype) for name, column in COLUMNS.items()
        }
        self.slot = np.zeros(rows, np.int32)  # of each row's adapter
        self.has_extras = [False] * rows
        self.logprobs: list[int | None] = [None] * rows

    def update(self, members: Sequence[Member]) -> None:
        """Apply the changes of a plan."""
        for member in members:
            for group, blocks in enumerate(member.new_blocks):
                self._set_blocks(group, member.row, member.num_old_blocks, blocks)
            if member.sampling is not None:
                self._set_sampling(member.row, member.sampling)

    def has_adapters(self, rows: Sequence[int]) -> bool:
        """True if a request of these rows has an adapter."""
        return bool(self.slot[rows].any())

    def _set_blocks(self, group: int, row: int, first: int, blocks: Sequence[int]) -> None:
        """Write entries of a row from `first` on. `NO_BLOCK` is not an index; a hit has it in the first entries."""
        if blocks and blocks[0] == NO_BLOCK:
            blocks = np.maximum(blocks, 0).tolist()
        self.blocks[group, row, first : first + len(blocks)] = blocks

    def _set_sampling(self, row: int, sampling: RowSampling) -> None:
        for name, column in COLUMNS.items():
            self.sampling[name][row] = column.value(sampling)
        self.slot[row] = sampling.slot
        self.has_extras[row], self.logprobs[row] = sampling.params.has_extras, sampling.params.logprobs
