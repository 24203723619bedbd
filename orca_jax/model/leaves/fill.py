"""Fill the parameters of a decoder from leaves of files, each device its own shards.

Each leaf is read once, in the order of the files, by a few threads. The host holds only the leaves being read, beside
the result on a CPU. A parameter with the layers stacked is put together on an accelerator, a leaf at a time.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from orca_jax.helpers.console import Progress
from orca_jax.model.files.finite import NotFinite
from orca_jax.model.files.stripes import aligned_empty
from orca_jax.model.leaves.base import Leaf, ShardPart, Source
from orca_jax.model.parameters import Wanted, bounds_of, first_line
from orca_jax.values.errors import CheckpointError
from orca_jax.values.platforms import platform_of

MAX_THREADS = 4  # more of them do not read faster from the page cache, and each holds a matrix
MOST_HELD = 2**28
"""Bytes beside the result, of all leaves that are read at once; a larger leaf is read alone."""


@dataclass(eq=False)
class _Parameter:
    """A parameter that is filled in the memory of the host, and then moved. On a CPU this memory becomes the array."""

    path: str
    shape: jax.ShapeDtypeStruct
    source: Source
    shards: Mapping[tuple[range, ...], Sequence[jax.Device]]
    left: int  # leaves to read
    held: list[np.ndarray] = field(default_factory=list)

    def index(self, number: int) -> tuple[int, ...]:
        """The place of a leaf on the axes that number the leaves."""
        axes = self.shape.shape[: self.source.num_stacked]
        return tuple(map(int, np.unravel_index(number, axes)))

    def memory(self, number: int) -> list[np.ndarray]:
        """The memory for a leaf, a part for each shard."""
        if not self.held:
            self.held = self._empty(0)
        return [values[self.index(number)] for values in self.held]

    def parts(self, number: int) -> list[ShardPart]:
        """The parts that a leaf fills."""
        begin = self.source.num_stacked
        return [
            ShardPart(values, bounds[begin:], self.shape.shape[begin:])
            for bounds, values in zip(self.shards, self.memory(number), strict=True)
        ]

    def add(self, number: int) -> None:
        """Take note of a leaf that was read."""
        self.left -= 1

    def take(self) -> Array:
        """The filled parameter. It is not held here any more: a caller that quantises it frees it at once."""
        held = self.held
        self.held = []
        return self._moved(held, self.shape.shape, self._sharding)

    @property
    def _sharding(self) -> Sharding:
        assert self.shape.sharding is not None
        return self.shape.sharding

    def _empty(self, begin: int) -> list[np.ndarray]:
        """Memory for the axes from `begin` on, for each shard."""
        dtype = np.dtype(self.shape.dtype)
        return [aligned_empty(tuple(map(len, bounds[begin:])), dtype) for bounds in self.shards]

    def _moved(
        self, parts: Sequence[np.ndarray], shape: tuple[int, ...], sharding: Sharding
    ) -> Array:
        """The array of some parts, one for each shard."""
        arrays: list[Array] = []
        for values, devices in zip(parts, self.shards.values(), strict=True):
            arrays += [jax.device_put(values, device) for device in devices]
        if _has_own_memory(next(iter(self.shards.values()))[0]):
            jax.block_until_ready(arrays)
        joined: Array = jax.make_array_from_single_device_arrays(shape, sharding, arrays)
        return joined


@dataclass(eq=False)
class _Stack(_Parameter):
    """A parameter that is filled on accelerators, a leaf at a time."""

    array: Array | None = None
    pieces: dict[int, list[np.ndarray]] = field(default_factory=dict)  # by the numbers of leaves

    def memory(self, number: int) -> list[np.ndarray]:
        self.pieces[number] = self._empty(self.source.num_stacked)
        return self.pieces[number]

    def add(self, number: int) -> None:
        super().add(number)
        begin = self.source.num_stacked
        shape = self.shape.shape
        sharding = self._sharding
        assert isinstance(sharding, NamedSharding)
        inner = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[begin:]))
        piece = self._moved(self.pieces.pop(number), shape[begin:], inner)
        stack = self.array
        if stack is None:
            stack = jnp.zeros(shape, self.shape.dtype, device=sharding)
        self.array = _putting()(stack, piece, tuple(map(np.int32, self.index(number))))
        jax.block_until_ready(self.array)  # so that few pieces wait on the devices

    def take(self) -> Array:
        filled = self.array
        assert filled is not None, "a parameter has at least one leaf"
        self.array = None
        return filled


@cache
def _putting() -> "jax.stages.Wrapped":
    """Return the program that puts a piece into a stack in place."""

    def put(stack: Array, piece: Array, index: tuple[Array, ...]) -> Array:
        start: list[Array | int] = [*index, *[0] * piece.ndim]
        return jax.lax.dynamic_update_slice(
            stack, piece.reshape((1,) * len(index) + piece.shape), start
        )

    return jax.jit(put, donate_argnums=0)


class _LeafRead(NamedTuple):
    """A leaf, and the parameters that are filled from it, each with the number of the leaf in it."""

    leaf: Leaf
    parts: list[tuple[_Parameter, int]]


def filled(
    source: str,
    wanted: Wanted,
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    sources: Mapping[str, Source],
    progress: Progress,
    as_held: Callable[[str, Array], Array] = lambda path, array: array,
    remedy: str = "",
) -> nnx.State:
    """Read all parameters of a decoder.

    Args:
        source: the directory or file, for errors.
        wanted: the parameters.
        shapes: shapes and shardings of those to be read, by path.
        sources: their leaves.
        progress: called after each parameter.
        as_held: changes a read parameter to what `wanted` has, but for quantised ones.
        remedy: the advice in errors.

    Raises:
        CheckpointError: lists each leaf that cannot be read.
    """
    values: dict[str, Array] = {}
    parts = wanted.make_parts()
    problems: list[str] = []
    not_finite = NotFinite()
    for path, array in fill(shapes, sources, progress, problems, not_finite):
        values |= parts(path, as_held(path, array))
    if problems:
        raise CheckpointError(source, problems, remedy=remedy)
    not_finite.warn(source)
    return wanted.filled(values)


def fill(
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    sources: Mapping[str, Source],
    progress: Progress,
    problems: list[str],
    not_finite: NotFinite,
) -> Iterator[tuple[str, Array]]:
    """Yield each parameter with its path as soon as it is filled.

    Args:
        shapes: shapes and shardings, by path.
        sources: the leaves of each of these parameters.
        progress: called after each parameter.
        problems: takes a line for each leaf that cannot be read.
        not_finite: takes the number of NaN and infinite values of each leaf.
    """
    parameters = [_parameter(path, shape, sources[path]) for path, shape in shapes.items()]
    done = 0
    for reading, result in _read(_readings(parameters)):
        if isinstance(result, OSError):
            problems.append(f"{reading.leaf.key}: cannot be read: {first_line(result)}")
            continue
        not_finite.add_tensor(reading.leaf.key, result)
        for parameter, number in reading.parts:
            parameter.add(number)
            if not parameter.left:
                done += 1
                progress(done, len(parameters))
                yield parameter.path, parameter.take()


def _parameter(path: str, shape: jax.ShapeDtypeStruct, source: Source) -> _Parameter:
    assert shape.sharding is not None
    devices: dict[tuple[range, ...], list[jax.Device]] = {}
    for device, index in shape.sharding.addressable_devices_indices_map(shape.shape).items():
        assert index is not None, "every parameter has at least one axis"
        devices.setdefault(bounds_of(index, shape.shape), []).append(device)
    first = next(iter(devices.values()))[0]
    kind = _Stack if source.num_stacked and _has_own_memory(first) else _Parameter
    return kind(path, shape, source, devices, len(source.leaves))


def _has_own_memory(device: jax.Device) -> bool:
    """True if the memory of the host is not that of a device."""
    return not platform_of(device).is_host


def _readings(parameters: list[_Parameter]) -> Iterator[_LeafRead]:
    """Yield what is read in the order of the files, and then the stacks on accelerators.

    Stacks of other leaves are read one after the other.
    """
    readings: dict[Leaf, _LeafRead] = {}
    stacks: dict[Sequence[Leaf], list[_Parameter]] = {}
    for parameter in parameters:
        if isinstance(parameter, _Stack):
            stacks.setdefault(parameter.source.leaves, []).append(parameter)
            continue
        for number, leaf in enumerate(parameter.source.leaves):
            readings.setdefault(leaf, _LeafRead(leaf, [])).parts.append((parameter, number))
    yield from sorted(readings.values(), key=lambda reading: reading.leaf.order)
    for leaves, same in stacks.items():
        for number, leaf in enumerate(leaves):
            yield _LeafRead(leaf, [(parameter, number) for parameter in same])


class _Running(NamedTuple):
    reading: _LeafRead
    future: Future[int]
    held: int  # bytes beside the result


def _read(readings: Iterator[_LeafRead]) -> Iterator[tuple[_LeafRead, OSError | int]]:
    """Read in threads, a few leaves ahead, and yield each in order, with its result or its error."""
    threads = _num_threads()
    running: deque[_Running] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        for reading in readings:
            places = _places(reading)
            needed = reading.leaf.memory_for(places)
            while running and (
                len(running) > threads or needed + sum(each.held for each in running) > MOST_HELD
            ):
                yield _result(running.popleft())
            running.append(_Running(reading, pool.submit(reading.leaf.read_into, places), needed))
        while running:
            yield _result(running.popleft())


def _num_threads() -> int:
    return min(MAX_THREADS, os.cpu_count() or 1)


def _result(running: _Running) -> tuple[_LeafRead, OSError | int]:
    try:
        return running.reading, running.future.result()
    except OSError as error:
        return running.reading, error


def _places(reading: _LeafRead) -> list[object]:
    """The places that a leaf fills."""
    found: list[object] = []
    for parameter, number in reading.parts:
        found += [parameter.source.place(number, part) for part in parameter.parts(number)]
    return found
