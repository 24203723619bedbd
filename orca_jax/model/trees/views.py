"""Arrays that are read in parts. A view changes shape or order, and reads no more than the part needs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorstore

ViewShape = tuple[int, ...]
Bounds = Sequence[range]
"""A contiguous part of an array, one range for each axis."""

PendingRead = Callable[[], np.ndarray]
"""Waits for a started read, and returns its values."""


@runtime_checkable
class View(Protocol):
    """An array on disk or in memory, read in parts."""

    @property
    def shape(self) -> ViewShape:
        """The shape of the whole array."""
        ...

    def start(self, bounds: Bounds) -> PendingRead:
        """Start to read a part."""
        ...


@dataclass(frozen=True)
class Stored:
    """An open array of TensorStore."""

    store: Any

    @property
    def shape(self) -> ViewShape:
        """The shape of the array."""
        return tuple(self.store.shape)

    @property
    def dtype(self) -> np.dtype:
        """The type of the values."""
        return np.dtype(self.store.dtype.numpy_dtype)

    def start_into(self, bounds: Bounds, targets: Sequence[np.ndarray]) -> Callable[[], None]:
        """Start to read a part into arrays of its type that follow each other along the first axis.

        Returns:
            a function that waits for it.
        """
        part = self.store.translate_to[0][
            tuple(slice(bound.start, bound.stop) for bound in bounds)
        ].translate_to[0]
        arrays = [tensorstore.array(each) for each in targets]
        target = arrays[0] if len(arrays) == 1 else tensorstore.concat(arrays, axis=0)
        return target.write(part).result

    def start(self, bounds: Bounds) -> PendingRead:
        """Start to read a part."""
        future = self.store.translate_to[0][
            tuple(slice(bound.start, bound.stop) for bound in bounds)
        ].read()
        return lambda: np.asarray(future.result())


@dataclass(frozen=True)
class Transposed:
    """A view with its axes in another order: axis i is `axes[i]` of the view."""

    view: View
    axes: tuple[int, ...]

    @property
    def shape(self) -> ViewShape:
        """The shape in the new order."""
        return tuple(self.view.shape[axis] for axis in self.axes)

    def start(self, bounds: Bounds) -> PendingRead:
        """Start to read a part."""
        inner = [bounds[self.axes.index(axis)] for axis in range(len(self.axes))]
        read = self.view.start(inner)
        return lambda: read().transpose(self.axes)


@dataclass(frozen=True)
class Taken:
    """The entries `index` of one axis of a view, in the order of `index`."""

    view: View
    axis: int
    index: np.ndarray

    @property
    def shape(self) -> ViewShape:
        """The shape with as many entries as the index has."""
        return (*self.view.shape[: self.axis], len(self.index), *self.view.shape[self.axis + 1 :])

    def start(self, bounds: Bounds) -> PendingRead:
        """Start to read a part. All entries between the first and the last are read."""
        index = self.index[bounds[self.axis].start : bounds[self.axis].stop]
        least, most = (int(index.min()), int(index.max())) if len(index) else (0, -1)
        inner = list(bounds)
        inner[self.axis] = range(least, most + 1)
        read = self.view.start(inner)
        if np.array_equal(index, np.arange(least, most + 1)):
            return read
        return lambda: read().take(index - least, axis=self.axis)


@dataclass(frozen=True)
class Entry:
    """One entry of an axis of a view, without the axis."""

    view: View
    axis: int
    number: int

    @property
    def shape(self) -> ViewShape:
        """The shape without the axis."""
        return (*self.view.shape[: self.axis], *self.view.shape[self.axis + 1 :])

    def start(self, bounds: Bounds) -> PendingRead:
        """Start to read a part."""
        inner = list(bounds)
        inner.insert(self.axis, range(self.number, self.number + 1))
        read = self.view.start(inner)
        return lambda: read().squeeze(self.axis)


@dataclass(frozen=True)
class Scaled:
    """A view with its values multiplied, in float32 or float64."""

    view: View
    factor: float

    @property
    def shape(self) -> ViewShape:
        """The same shape."""
        return self.view.shape

    def start(self, bounds: Bounds) -> PendingRead:
        """Start to read a part."""
        read = self.view.start(bounds)

        def scaled() -> np.ndarray:
            values = read()
            kind = np.float64 if values.dtype == np.float64 else np.float32
            return np.multiply(values, self.factor, dtype=kind)

        return scaled


@dataclass(frozen=True)
class Stacked:
    """Views of one shape along a new first axis."""

    views: tuple[View, ...]

    @property
    def shape(self) -> ViewShape:
        """The shape with the new axis."""
        return (len(self.views), *self.views[0].shape)

    def start(self, bounds: Bounds) -> PendingRead:
        """Start to read a part."""
        reads = [self.views[number].start(bounds[1:]) for number in bounds[0]]
        empty = [0, *map(len, bounds[1:])]
        return lambda: (
            np.stack([read() for read in reads]) if reads else np.empty(empty, np.float32)
        )


class Reshaped:
    """A view with its axes joined or split, in the order of memory.

    Raises:
        ValueError: the sizes have another product.
    """

    def __init__(self, view: View, shape: ViewShape) -> None:
        if math.prod(view.shape) != math.prod(shape) or 0 in shape:
            raise ValueError(
                f"an array of shape {list(view.shape)} cannot be reshaped to {list(shape)}"
            )
        self._view = view
        self.shape: ViewShape = shape
        self._groups = _groups(view.shape, shape)

    def start(self, bounds: Bounds) -> PendingRead:
        """Start to read a part. An axis that is split is read from the first to the last entry of the part."""
        inner: list[range] = []
        lengths, picks = [], []
        for before, after in self._groups:
            old = self._view.shape[before.start : before.stop]
            part = [bounds[axis] for axis in after]
            flat = _flat(part, [self.shape[axis] for axis in after])
            cover, first = [range(0)] * len(old), 0
            if flat.size:
                cover, first = _cover(old, int(flat.min()), int(flat.max()))
            inner += cover
            lengths.append(math.prod(map(len, cover)))
            picks.append(flat - first)
        read = self._view.start(inner)

        def reshaped() -> np.ndarray:
            values = read().reshape(lengths)
            for group, pick in reversed(list(enumerate(picks))):
                if pick.size != lengths[group]:
                    values = values.take(pick, axis=group)
                else:  # all of it, in order
                    values = values.reshape(
                        *values.shape[:group], *pick.shape, *values.shape[group + 1 :]
                    )
            return values

        return reshaped


def _groups(before: ViewShape, after: ViewShape) -> list[tuple[range, range]]:
    """The shortest runs of axes with equal products in both shapes."""
    groups = []
    i = j = 0
    while i < len(before) or j < len(after):
        start = i
        first = j
        left = right = 1
        while start == i or first == j or left != right:
            if (left <= right and i < len(before)) or j == len(after):
                left = left * before[i]
                i += 1
            else:
                right = right * after[j]
                j += 1
            if i == len(before) and j == len(after):
                break
        groups.append((range(start, i), range(first, j)))
    return groups


def _flat(bounds: Bounds, shape: Sequence[int]) -> np.ndarray:
    """The places in memory of the entries of a part, in its shape."""
    places = np.zeros((), np.int64)
    for bound, size in zip(bounds, shape, strict=True):
        places = places[..., None] * size + np.arange(bound.start, bound.stop)
    return places


def _cover(shape: ViewShape, least: int, most: int) -> tuple[list[range], int]:
    """The smallest contiguous part that has the places `least` to `most`, and its first place."""
    cover: list[range] = []
    first = 0
    step = math.prod(shape)
    for axis, size in enumerate(shape):
        step //= size
        low = (least - first) // step
        high = (most - first) // step
        cover.append(range(low, high + 1))
        first += low * step
        if low != high:
            return [*cover, *(range(rest) for rest in shape[axis + 1 :])], first
    return cover, first
