"""The protocols of leaves. A format of files has its own leaves; sharding, threads and progress are those of `fill`."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np


class ShardPart(NamedTuple):
    """A part of a parameter, or of one of its matrices, in the memory of the host.

    Attributes:
        values: the memory to fill.
        bounds: the entries of the parameter or of the matrix in this part, for each axis.
        shape: the whole parameter or matrix.
    """

    values: np.ndarray
    bounds: tuple[range, ...]
    shape: tuple[int, ...]


@runtime_checkable
class Leaf(Protocol):
    """A matrix or an array of a file. Equal leaves are read once."""

    @property
    def key(self) -> str:
        """The name in messages."""
        ...

    @property
    def order(self) -> tuple[int, int]:
        """Sorts leaves by their places in the files."""
        ...

    def memory_for(self, places: Sequence[Any]) -> int:
        """The bytes that `read_into` holds beside the places."""
        ...

    def read_into(self, places: Sequence[Any]) -> int:
        """Fill all places, made by sources of this leaf.

        Returns:
            the number of read values that are NaN or infinite.

        Raises:
            OSError: the file cannot be read.
        """
        ...


@runtime_checkable
class Placed(Protocol):
    """A matrix of a file, with its name and its place."""

    @property
    def key(self) -> str: ...
    @property
    def order(self) -> tuple[int, int]: ...


class OfMatrix:
    """The name and the place of what stands for a matrix: those of the matrix."""

    matrix: Placed

    @property
    def key(self) -> str:
        """The name of its tensor."""
        return self.matrix.key

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the files."""
        return self.matrix.order


@runtime_checkable
class Source(Protocol):
    """The leaves of a parameter."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """Those of the layers and experts in the parameter, in order; or a single one."""
        ...

    @property
    def num_stacked(self) -> int:
        """The first axes of the parameter that number the leaves, such as 2 for layers and experts."""
        ...

    def place(self, number: int, part: ShardPart) -> Any:
        """The place that the leaf `number` fills, for its `read_into`."""
        ...
