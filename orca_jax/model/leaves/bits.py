"""Leaves whose bits are kept: matrices of few bits, packed for the library in C or with scales for XLA."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orca_jax.model.leaves.base import OfMatrix, ShardPart
from orca_jax.model.matrices.grouped import GroupedNumbers
from orca_jax.model.matrices.stored import StoredBits, StoredMatrices
from orca_jax.model.parameters import Wanted, flat_parameters
from orca_jax.values.errors import CheckpointError

_FORM = ".forms."  # before the number of a form of a mixed matrix
_ORDER = "order"
_NUMBERS_BYTES = 4  # most bytes of a number while its form changes


class BitsPlace(NamedTuple):
    """Memory for a part of a matrix, such as its scales, by the name of the part."""

    name: str
    part: ShardPart

    def take_part(self, values: np.ndarray) -> None:
        """Copy what is needed of the whole part. Groups of the files may be several in memory."""
        shape = self.part.shape
        if len(shape) == 2 and len(values) < shape[0]:
            values = np.repeat(values, shape[0] // len(values), axis=0)
        self.part.values[...] = values.reshape(shape)[self._index]

    def take_blocks(self, first: int, blocks: np.ndarray) -> None:
        """Copy what is needed of the blocks from `first` on."""
        own = self.part.bounds[0]
        begin = max(first, own.start)
        end = min(first + len(blocks), own.stop)
        if begin < end:
            needed = blocks[begin - first : end - first][:, *self._index[1:]]
            self.part.values[begin - own.start : end - own.start] = needed

    @property
    def _index(self) -> tuple[slice, ...]:
        return tuple(slice(bound.start, bound.stop) for bound in self.part.bounds)


@dataclass(frozen=True, eq=False)
class BitsLeaf(OfMatrix):
    """A matrix of few bits in files.

    Attributes:
        matrix: the matrix.
        size: the number of packed blocks and their width; None: the numbers are for XLA.
    """

    matrix: StoredBits
    size: tuple[int, int] | None

    def memory_for(self, places: Sequence[BitsPlace]) -> int:
        """Return the bytes of the numbers while their form changes."""
        return _NUMBERS_BYTES * sum(place.part.values.nbytes for place in places)

    def read_into(self, places: Sequence[BitsPlace]) -> int:
        """Fill all parts. Raises OSError."""
        if self.size is None:
            numbers = self.matrix.grouped_numbers()
            for place in places:
                place.take_part(getattr(numbers, place.name))
            return 0
        of_blocks = [place for place in places if place.name != _ORDER]
        for first, packed in self.matrix.blocks(*self.size):
            for place in of_blocks:
                place.take_blocks(first, getattr(packed, place.name))
        for place in places:
            if place.name == _ORDER:
                assert self.matrix.input_order is not None, "the form has an order"
                place.take_part(self.matrix.input_order)
        return 0


@dataclass(frozen=True)
class BitsSource:
    """A part, such as the scales, of all matrices of a parameter."""

    leaves: tuple[BitsLeaf, ...]
    num_stacked: int
    name: str

    def place(self, number: int, part: ShardPart) -> BitsPlace:
        """The memory that a matrix fills."""
        return BitsPlace(self.name, part)


def bits_sources(source: str, stored: StoredMatrices, wanted: Wanted) -> dict[str, BitsSource]:
    """The sources of the parameters that keep their bits.

    Args:
        source: the files, for errors.
        stored: their matrices, in open files.
        wanted: the parameters of a stage, in the form of `keep_bits`.

    Raises:
        CheckpointError: a matrix is no longer in few bits.
    """
    shapes = {path: leaf.shape for path, leaf in flat_parameters(wanted.shapes).items()}
    found: dict[str, BitsSource] = {}
    for path, shape in shapes.items():
        name, _, kind = path.rpartition(".")
        if kind == "words":
            *stack, num_blocks, _, width = shape
            size = num_blocks, width
            names: Sequence[str] = ("words", "scales", "minima", "units", _ORDER)
        elif kind == "values":
            *stack, _, _ = shape
            size = None
            names = GroupedNumbers._fields
        else:
            continue
        matrices = list(_matrices(stored, name, wanted.layers))
        if not matrices:
            problem = f"{name}: the files have changed since their bits were counted: start again"
            raise CheckpointError(source, [problem])
        leaves = tuple(BitsLeaf(matrix, size) for matrix in matrices)
        for part in names:
            if f"{name}.{part}" in shapes:
                found[f"{name}.{part}"] = BitsSource(leaves, len(stack), part)
    return found


def _matrices(stored: StoredMatrices, name: str, layers: range) -> Iterator[StoredBits]:
    """Those of a parameter, or those of one of its forms."""
    whole, _, number = name.partition(_FORM)
    found = stored.of(whole, layers)
    if not number:
        yield from found
        return
    forms = list(dict.fromkeys([matrix.form for matrix in found]))
    own = forms[int(number) : int(number) + 1]
    yield from [matrix for matrix in found if matrix.form in own]
