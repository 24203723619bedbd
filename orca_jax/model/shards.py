"""Fill the parameters of a decoder from the matrices of files, each device its own shards.

Each matrix is read once, in the order of the files, by a few threads. With a parameter for each layer, the host holds
only the matrices being copied, beside the result on a CPU. A parameter with the layers stacked is filled shard by shard
for an accelerator, so that the host holds one shard and perhaps the begin of the next; on a CPU the shards are the
result.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, product
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from orca_jax.helpers.console import Progress
from orca_jax.model.families.base import Weight
from orca_jax.model.files.finite import NotFinite
from orca_jax.model.files.stripes import (
    CopyTarget,
    PackedTarget,
    TensorRows,
    aligned_empty,
    as_range,
    copy,
)
from orca_jax.model.parameters import (
    bounds_of,
    copied_columns,
    first_line,
    head_dim_of,
    is_of_vocabulary,
    num_copies,
    stored_shape,
)
from orca_jax.values.config import ModelConfig
from orca_jax.values.platforms import platform_of

MAX_THREADS = 4  # more of them do not read faster from the page cache, and each holds a matrix


class Source(NamedTuple):
    """The matrices of a parameter.

    Attributes:
        weight: the row of the family's table.
        matrices: those of the layers and experts in the parameter, in order; or a single one.
        num_stacked: first axes of the parameter that number the matrices, such as 2 for layers and experts.
        packed_width: columns of a block of a packed matrix, whose columns are rows of the files; 0 for plain ones.
    """

    weight: Weight
    matrices: tuple[TensorRows, ...]
    num_stacked: int
    packed_width: int = 0


@dataclass(eq=False)
class _Slab:
    """A shard of a parameter, in the memory of the host while it is filled."""

    bounds: tuple[range, ...]
    devices: list[jax.Device]
    left: int  # matrices to copy
    values: np.ndarray | None = None
    arrays: list[Array] = field(default_factory=list)  # on the devices, when it is filled


@dataclass(eq=False)
class _Parameter:
    path: str
    leaf: jax.ShapeDtypeStruct
    source: Source
    slabs: list[_Slab]

    @property
    def is_by_shard(self) -> bool:
        """True if the host may not have room for all shards at once."""
        return self.source.num_stacked > 0 and not platform_of(self.slabs[0].devices[0]).is_host

    @property
    def is_filled(self) -> bool:
        return all(slab.arrays for slab in self.slabs)

    def take(self) -> Array:
        """The filled parameter. It is not held here any more: a caller that quantises it frees it at once."""
        arrays = [*chain.from_iterable(slab.arrays for slab in self.slabs)]
        for slab in self.slabs:
            slab.arrays = []
        joined: Array = jax.make_array_from_single_device_arrays(
            self.leaf.shape, self.leaf.sharding, arrays
        )
        return joined


class _Filling(NamedTuple):
    parameter: _Parameter
    slab: _Slab
    number: int  # of the matrix in the parameter


class _MatrixCopy(NamedTuple):
    """A matrix, and all that is filled from it."""

    matrix: TensorRows
    parts: list[_Filling]


def fill(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    sources: Mapping[str, Source],
    config: ModelConfig,
    progress: Progress,
    problems: list[str],
    not_finite: NotFinite,
) -> Iterator[tuple[str, Array]]:
    """Yield each parameter with its path as soon as it is filled.

    Args:
        leaves: shapes and shardings, by path.
        sources: the sources of each of these parameters.
        config: the configuration as the mesh holds the model.
        progress: called after each parameter.
        problems: takes a line for each matrix that cannot be read.
        not_finite: takes the number of NaN and infinite values of each matrix.
    """
    parameters = [_parameter(path, leaf, sources[path]) for path, leaf in leaves.items()]
    done = 0
    for job, result in _copied(_jobs(parameters), config):
        if isinstance(result, OSError):
            problems.append(f"{job.matrix.key}: cannot be read: {first_line(result)}")
            continue
        not_finite.add_tensor(job.matrix.key, result)
        for part in job.parts:
            part.slab.left -= 1
            if part.slab.left:
                continue
            _move(part.slab)
            if part.parameter.is_filled:
                done += 1
                progress(done, len(parameters))
                yield part.parameter.path, part.parameter.take()


def _parameter(path: str, leaf: jax.ShapeDtypeStruct, source: Source) -> _Parameter:
    assert leaf.sharding is not None
    devices: dict[tuple[range, ...], list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        assert index is not None, "every parameter has at least one axis"
        devices.setdefault(bounds_of(index, leaf.shape), []).append(device)
    slabs = [_Slab(bounds, sharing, len(source.matrices)) for bounds, sharing in devices.items()]
    return _Parameter(path, leaf, source, slabs)


def _jobs(parameters: list[_Parameter]) -> Iterator[_MatrixCopy]:
    """Yield the jobs in the order of the files, and then those of shards for which the host has little room."""
    jobs: dict[str, _MatrixCopy] = {}
    by_shard = [parameter for parameter in parameters if parameter.is_by_shard]
    for parameter in parameters:
        if parameter.is_by_shard:
            continue
        for number, matrix in enumerate(parameter.source.matrices):
            parts = jobs.setdefault(matrix.key, _MatrixCopy(matrix, [])).parts
            parts += [_Filling(parameter, slab, number) for slab in parameter.slabs]
    yield from sorted(jobs.values(), key=lambda job: job.matrix.order)
    for parameter in by_shard:
        for slab, (number, matrix) in product(
            parameter.slabs, enumerate(parameter.source.matrices)
        ):
            yield _MatrixCopy(matrix, [_Filling(parameter, slab, number)])


def _copied(
    jobs: Iterator[_MatrixCopy], config: ModelConfig
) -> Iterator[tuple[_MatrixCopy, OSError | int]]:
    """Run the jobs in threads, a few ahead, and yield each in order, with its result or its error."""
    threads = _num_threads()
    running: deque[tuple[_MatrixCopy, Future[int]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        for job in jobs:
            if len(running) > threads:
                yield _result(*running.popleft())
            running.append(
                (job, pool.submit(copy, job.matrix, [_place(part, config) for part in job.parts]))
            )
        while running:
            yield _result(*running.popleft())


def _num_threads() -> int:
    return min(MAX_THREADS, os.cpu_count() or 1)


def _result(job: _MatrixCopy, future: Future[int]) -> tuple[_MatrixCopy, OSError | int]:
    try:
        return job, future.result()
    except OSError as error:
        return job, error


def _place(part: _Filling, config: ModelConfig) -> CopyTarget | PackedTarget:
    """The memory that a matrix fills, and its rows and columns. Rows beyond the stored ones are zeros."""
    parameter = part.parameter
    slab = part.slab
    weight = part.parameter.source.weight
    if slab.values is None:
        slab.values = aligned_empty(tuple(map(len, slab.bounds)), np.dtype(parameter.leaf.dtype))
    values = slab.values
    bounds = slab.bounds
    shape = parameter.leaf.shape
    for axis in np.unravel_index(part.number, shape[: parameter.source.num_stacked]):
        values = values[int(axis) - bounds[0].start]
        bounds = bounds[1:]
        shape = shape[1:]
    if width := parameter.source.packed_width:
        blocks, lines, _ = bounds
        each = shape[-1] // width
        rows, outputs = (
            range(size * own.start, size * own.stop)
            for size, own in ((each, lines), (width, blocks))
        )
        return PackedTarget(values, rows, outputs, width)
    columns = _columns(weight, bounds[-1], config)
    if len(bounds) == 1:
        if is_of_vocabulary(weight.path):
            columns = range(
                bounds[0].start, max(bounds[0].start, min(bounds[0].stop, config.vocab_size))
            )
            values[len(columns) :] = 0
            values = values[: len(columns)]
        return CopyTarget(values[None], range(1), columns, is_transposed=False)
    stored = stored_shape(weight.path, shape, config)[0]
    start = min(bounds[0].start, stored)
    stop = min(bounds[0].stop, stored)
    values[stop - start :] = 0
    rows = range(start + weight.first_row, stop + weight.first_row)
    is_turned = parameter.source.matrices[part.number].is_turned
    is_transposed = weight.transpose != is_turned
    return CopyTarget(values[: stop - start], rows, columns, is_transposed=is_transposed)


def _columns(weight: Weight, wanted: range, config: ModelConfig) -> range | np.ndarray:
    """The columns of the matrix, after a transposition, that the columns `wanted` of a parameter come from."""
    copies = num_copies(weight.path, config)
    if copies == 1 and weight.part is None:
        return wanted
    columns = np.arange(wanted.start, wanted.stop)
    if copies != 1:
        columns = copied_columns(wanted, copies, head_dim_of(weight.path, config))
    return as_range(columns if weight.part is None else weight.part.column(columns))


def _move(slab: _Slab) -> None:
    """Put a filled shard on its devices. On a CPU its memory becomes the array."""
    slab.arrays = [jax.device_put(slab.values, device) for device in slab.devices]
    if not platform_of(slab.devices[0]).is_host:
        jax.block_until_ready(slab.arrays)
    slab.values = None
