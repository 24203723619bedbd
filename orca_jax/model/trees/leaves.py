"""Leaves that are arrays of trees: those of checkpoints, and those in memory."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import numpy as np

from orca_jax.helpers.buckets.problems import problem_of_array
from orca_jax.model.files.finite import PART_BYTES, num_not_finite
from orca_jax.model.leaves.base import ShardPart
from orca_jax.model.parameters import (
    copied_columns,
    head_dim_of,
    layers_of,
    num_copies,
    split_layer,
)
from orca_jax.model.trees.views import PendingRead, Stored, Taken, View
from orca_jax.values.config import ModelConfig


class ViewPlace(NamedTuple):
    """Memory, and the entries of a view that fill it. Entries beyond those of the view are zeros."""

    values: np.ndarray
    bounds: tuple[range, ...]


@dataclass(frozen=True, eq=False)
class ViewLeaf:
    """The values of a parameter with all layers.

    Attributes:
        key: the path of the parameter.
        view: its values.
        number: its place among others.
    """

    key: str
    view: View
    number: int

    @property
    def order(self) -> tuple[int, int]:
        """Its place among others."""
        return 0, self.number

    def memory_for(self, places: Sequence[ViewPlace]) -> int:
        """Return the bytes of all places, which are read before they are copied."""
        return sum(place.values.nbytes for place in places)

    def read_into(self, places: Sequence[ViewPlace]) -> int:
        """Fill all places. Those that differ in the first axis alone, such as layers, are read together.

        Raises:
            OSError: the array cannot be read.
        """
        together: dict[tuple[range, ...], list[ViewPlace]] = {}
        for place in places:
            together.setdefault(place.bounds[1:], []).append(place)
        try:
            reads = [_begun(self.view, group) for group in together.values()]
            return sum([read() for read in reads])
        except Exception as error:  # TensorStore raises several kinds for broken files
            raise OSError(problem_of_array(error)) from None


@dataclass(frozen=True)
class ViewSource:
    """The values of a parameter of some layers, or of one.

    Attributes:
        leaf: the values of the parameter with all layers.
        first: the first entry of the first axis.
        is_layer: the parameter is this entry alone, without the axis.
    """

    leaf: ViewLeaf
    first: int = 0
    is_layer: bool = False
    num_stacked: int = 0

    @property
    def leaves(self) -> tuple[ViewLeaf, ...]:
        """The leaf as the only one."""
        return (self.leaf,)

    def place(self, number: int, part: ShardPart) -> ViewPlace:
        """The memory that the view fills."""
        if self.is_layer:
            return ViewPlace(part.values[None], (_moved(range(1), self.first), *part.bounds))
        begin, *rest = part.bounds
        return ViewPlace(part.values, (_moved(begin, self.first), *rest))


def view_sources(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    views: Mapping[str, View],
    stacked: Collection[str],
    first_layer: int,
    config: ModelConfig,
) -> dict[str, ViewSource]:
    """The sources of the parameters of a stage.

    Args:
        shapes: their shapes; of a layer or of a stack.
        views: the values with all layers.
        stacked: the paths of the views with the layers as their first axis.
        first_layer: the first layer of the stage.
        config: the configuration as the mesh holds the model.
    """
    leaves: dict[str, ViewLeaf] = {}
    found: dict[str, ViewSource] = {}
    for path, shape in shapes.items():
        whole = path
        layer = None
        if path not in views:
            whole, layer = split_layer(path)
        if whole not in leaves:
            view = _with_copies(whole, views[whole], shape.shape[-1], config)
            leaves[whole] = ViewLeaf(whole, view, len(leaves))
        first = 0
        if whole in stacked:
            first = bisect_left(layers_of(whole, config), first_layer + (layer or 0))
        found[path] = ViewSource(leaves[whole], first, is_layer=layer is not None)
    return found


def _with_copies(path: str, view: View, num_columns: int, config: ModelConfig) -> View:
    """A view with as many copies of each key/value head as the mesh holds."""
    copies = num_copies(path, config)
    if copies == 1:
        return view
    columns = copied_columns(range(num_columns), copies, head_dim_of(path, config))
    return Taken(view, len(view.shape) - 1, columns)


def _moved(bound: range, by: int) -> range:
    return range(bound.start + by, bound.stop + by)


def _begun(view: View, places: Sequence[ViewPlace]) -> Callable[[], int]:
    """Start to fill some places. The result waits, and counts the values that are not finite."""
    ordered = sorted(places, key=lambda place: place.bounds[0].start)
    if isinstance(view, Stored) and _is_direct(view, ordered):
        outer = [range(ordered[0].bounds[0].start, ordered[-1].bounds[0].stop)]
        wait = view.start_into([*outer, *ordered[0].bounds[1:]], [each.values for each in ordered])
        return partial(_waited, wait, ordered)
    return partial(_copied, *_started(view, places), places)


def _is_direct(view: Stored, ordered: Sequence[ViewPlace]) -> bool:
    """True if some places have all entries of a part of a stored array, in its type."""
    stop = ordered[0].bounds[0].start
    for place in ordered:
        if place.bounds[0].start != stop or place.values.dtype != view.dtype:
            return False
        stop = place.bounds[0].stop
    last = (stop, *[bound.stop for bound in ordered[0].bounds[1:]])
    return all(end <= size for end, size in zip(last, view.shape, strict=True))


def _waited(wait: Callable[[], None], places: Sequence[ViewPlace]) -> int:
    wait()
    return sum([_num_not_finite(place.values) for place in places])


def _started(view: View, places: Sequence[ViewPlace]) -> tuple[PendingRead, int]:
    """Start to read the entries of some places, joined along the first axis. Returns the read and its first entry."""
    firsts = [place.bounds[0] for place in places]
    joined = range(min(each.start for each in firsts), max(each.stop for each in firsts))
    cut = [
        range(min(bound.start, size), min(bound.stop, size))
        for bound, size in zip((joined, *places[0].bounds[1:]), view.shape, strict=True)
    ]
    return view.start(cut), joined.start


def _copied(read: PendingRead, first: int, places: Sequence[ViewPlace]) -> int:
    """Wait for a read, fill the places, and count the values that are not finite."""
    values = read()
    for place in places:
        begin = place.bounds[0].start - first
        part = values[begin : begin + len(place.bounds[0])]
        inside = tuple(map(slice, part.shape))
        if part.shape != place.values.shape:
            place.values[...] = 0
        place.values[inside] = part
    return _num_not_finite(values)


def _num_not_finite(values: np.ndarray) -> int:
    """Count the values that are not finite. Each part that is read fits into the caches."""
    flat = values.ravel(order="K")
    step = PART_BYTES // flat.itemsize
    return sum([num_not_finite(flat[start : start + step]) for start in range(0, len(flat), step)])
