"""A row of a table: an array of a stored tree, operations on it, and the parameter that it becomes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from orca_jax.model.trees.views import Entry, Reshaped, Scaled, Taken, Transposed, View

LAYER = "{layer}"


@runtime_checkable
class TreeOperation(Protocol):
    """A change of an array. `lead` axes stand before its own: the layers, if they are in one array."""

    def __call__(self, view: View, lead: int) -> View:
        """The changed array. Raises ValueError if the array has no such shape."""
        ...


@dataclass(frozen=True)
class Reshape:
    """Join or split axes; one size may be -1."""

    shape: tuple[int, ...]

    def __call__(self, view: View, lead: int) -> View:
        own = view.shape[lead:]
        known = int(np.prod([size for size in self.shape if size != -1], dtype=np.int64))
        rest = int(np.prod(own, dtype=np.int64)) // max(known, 1)
        shape = [{-1: rest}.get(size, size) for size in self.shape]
        try:
            return Reshaped(view, (*view.shape[:lead], *shape))
        except ValueError:
            raise ValueError(
                f"shape {list(own)} cannot be reshaped to {list(self.shape)}"
            ) from None


@dataclass(frozen=True)
class Transpose:
    """Axes in another order."""

    axes: tuple[int, ...]

    def __call__(self, view: View, lead: int) -> View:
        if sorted(self.axes) != list(range(len(view.shape) - lead)):
            raise ValueError(
                f"shape {list(view.shape[lead:])} cannot be transposed to the axes {list(self.axes)}"
            )
        return Transposed(view, (*range(lead), *(axis + lead for axis in self.axes)))


@dataclass(frozen=True)
class Section:
    """The entries `start` to `stop` of an axis; None for the end."""

    axis: int
    start: int
    stop: int | None

    def __call__(self, view: View, lead: int) -> View:
        size = _size(view, self.axis, lead)
        stop = size if self.stop is None else self.stop
        if not 0 <= self.start < stop <= size:
            raise ValueError(
                f"axis {self.axis} of shape {list(view.shape[lead:])} has no part {self.start} to {stop}"
            )
        return Taken(view, self.axis + lead, np.arange(self.start, stop))


@dataclass(frozen=True)
class Pick:
    """One entry of an axis, without the axis."""

    axis: int
    number: int

    def __call__(self, view: View, lead: int) -> View:
        if not 0 <= self.number < _size(view, self.axis, lead):
            raise ValueError(
                f"axis {self.axis} of shape {list(view.shape[lead:])} has no entry {self.number}"
            )
        return Entry(view, self.axis + lead, self.number)


@dataclass(frozen=True)
class Halves:
    """The even entries of an axis before the odd ones.

    Some programs rotate neighbours (0, 1), (2, 3) of a head. This decoder rotates the pairs (d, d + D/2).
    """

    axis: int

    def __call__(self, view: View, lead: int) -> View:
        size = _size(view, self.axis, lead)
        if size % 2:
            raise ValueError(f"axis {self.axis} of shape {list(view.shape[lead:])} has no pairs")
        order = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
        return Taken(view, self.axis + lead, order)


@dataclass(frozen=True)
class Scale:
    """All values times `factor`."""

    factor: float

    def __call__(self, view: View, lead: int) -> View:
        return Scaled(view, self.factor)


OPERATIONS: Mapping[str, type[Reshape | Transpose | Section | Pick | Halves | Scale]] = {
    "reshape": Reshape,
    "transpose": Transpose,
    "part": Section,
    "pick": Pick,
    "halves": Halves,
    "scale": Scale,
}
"""By their names in mapping.json."""


def _size(view: View, axis: int, lead: int) -> int:
    """The size of an axis after the leading ones."""
    if not 0 <= axis < len(view.shape) - lead:
        raise ValueError(f"shape {list(view.shape[lead:])} has no axis {axis}")
    return view.shape[axis + lead]


@dataclass(frozen=True)
class TreeRow:
    """The mapping of arrays of a tree to a parameter.

    `source` has the keys of the array, joined by slashes. "{layer}" stands for the layer's number, if each layer has an
    array; `layer_axis` is the axis of the layers, if all are in one array. The operations are those on one layer.
    `path` is the parameter's path in the decoder, such as "blocks.mlp.up.kernel". It may have "{layer}" too, in
    decoders with separate parameters for each layer.
    """

    source: str
    path: str
    operations: tuple[TreeOperation, ...] = ()
    layer_axis: int | None = None

    @property
    def has_layers(self) -> bool:
        """True if the array or the arrays have a part for each layer."""
        return LAYER in self.source or self.layer_axis is not None


@dataclass(frozen=True)
class TreeTable:
    """The rows of a tree of one kind.

    Attributes:
        name: the name of the kind, for messages.
        rows: the arrays to read.
        ignored: keys, joined by slashes, below which arrays are not read.
    """

    name: str
    rows: tuple[TreeRow, ...]
    ignored: tuple[str, ...] = ()
