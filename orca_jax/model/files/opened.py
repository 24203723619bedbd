"""Open files with weights: those of a disk, and the objects of buckets that stand for files of a view."""

import os
from collections.abc import Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from orca_jax.helpers.buckets.problems import BucketError, changed
from orca_jax.helpers.buckets.store import Bucket
from orca_jax.helpers.buckets.views import located, shown
from orca_jax.helpers.file_state import FileState
from orca_jax.model.files.finite import PART_BYTES
from orca_jax.values.checks import open_regular
from orca_jax.values.errors import CheckpointError

REQUEST_BYTES = 8 * 2**20
"""Bytes of one request to a bucket."""
_REQUESTS = 4  # of one reader at once
CHANGED = "the file has changed since its header was read: start again"


@runtime_checkable
class OpenFile(Protocol):
    """A file that is open for reading.

    Attributes:
        number: its place among other open files.
        size: its bytes; None if they are not known before its header is read.
        step: bytes that are best read at once.
        state: equal to itself as long as the file has the same contents.
    """

    @property
    def number(self) -> int: ...
    @property
    def size(self) -> int | None: ...
    @property
    def step(self) -> int: ...
    @property
    def state(self) -> Hashable: ...

    def read(self, begin: int, length: int) -> bytes:
        """Return a part of the header; fewer bytes if the file ends before. Raises OSError."""
        ...

    def read_into(self, begin: int, values: np.ndarray) -> None:
        """Fill a contiguous array from the byte `begin` on. Raises OSError, also if the file ends before."""
        ...

    def ends_at(self, size: int) -> bool:
        """Return True if the file has exactly so many bytes. Raises OSError."""
        ...


@dataclass(frozen=True)
class LocalFile:
    """A file of a disk, by its descriptor."""

    number: int

    @property
    def size(self) -> int:
        """The bytes of the file now."""
        return os.fstat(self.number).st_size

    @property
    def step(self) -> int:
        """Bytes for the caches of a processor."""
        return PART_BYTES

    @property
    def state(self) -> FileState:
        """The size and the time of the last change now."""
        return FileState.of(self.number)

    def read(self, begin: int, length: int) -> bytes:
        """Return a part of the file."""
        return os.pread(self.number, length, begin)

    def read_into(self, begin: int, values: np.ndarray) -> None:
        """Fill a contiguous array."""
        left = memoryview(values.view(np.uint8).reshape(-1))
        while left.nbytes:
            count = os.preadv(self.number, [left], begin)
            if count == 0:
                raise OSError("the file ends within the tensor")
            left = left[count:]
            begin = begin + count

    def ends_at(self, size: int) -> bool:
        """Compare the sizes now."""
        return self.size == size


@dataclass(frozen=True, eq=False)
class BucketFile:
    """An object of a bucket, in the version of its view."""

    number: int
    bucket: Bucket
    key: str
    generation: str

    @property
    def size(self) -> None:
        """Not known: no small answer of a store tells it."""
        return

    @property
    def step(self) -> int:
        """The bytes of all requests at once."""
        return _REQUESTS * REQUEST_BYTES

    @property
    def state(self) -> str:
        """The generation of the object: others are never read."""
        return self.generation

    def read(self, begin: int, length: int) -> bytes:
        """Return a part of the header. Raises BucketError, also if the object ends before."""
        return self.bucket.read(self.key, self.generation, begin, begin + length)

    def read_into(self, begin: int, values: np.ndarray) -> None:
        """Fill a contiguous array, some requests at a time."""
        memory = memoryview(values.view(np.uint8).reshape(-1))
        for start in range(0, memory.nbytes, self.step):
            stop = min(start + self.step, memory.nbytes)
            firsts = range(start, stop, REQUEST_BYTES)
            places = [slice(first, min(first + REQUEST_BYTES, stop)) for first in firsts]
            ranges = [slice(begin + place.start, begin + place.stop) for place in places]
            found = self.bucket.ranges(self.key, self.generation, ranges)
            for place, part in zip(places, found, strict=True):
                memory[place] = part

    def ends_at(self, size: int) -> bool:
        """Ask for the last byte and for the one after it."""
        return self.bucket.ends_at(self.key, size)


def open_file(path: Path, stack: ExitStack, number: int = 0) -> OpenFile:
    """Open a file of a disk or of a view; the stack closes it.

    Args:
        path: its path.
        stack: closes it.
        number: the place of an object among others; a file has its descriptor.

    Raises:
        OSError: it is missing, cannot be opened, or is no regular file.
    """
    if (place := located(path)) is None:
        descriptor = open_regular(path)
        stack.callback(os.close, descriptor)
        return LocalFile(descriptor)
    view, key = place
    if key not in view.generations:
        raise BucketError(f"{view.name.url(key)} is missing or may not be read; copy it there")
    return BucketFile(number, Bucket(view.name), key, view.generations[key])


def check_unchanged(folder: Path) -> None:
    """Refuse arrays of a view after a change of its objects. Raises CheckpointError."""
    if (place := located(folder)) is None:
        return
    view = place[0]
    try:
        problems = [changed(view.name.url(key)) for key in view.changes()]
    except BucketError as error:
        problems = [str(error)]
    if problems:
        raise CheckpointError(shown(folder), problems)


def kvstore_of(folder: Path) -> Mapping[str, Any]:
    """Return TensorStore's specification of the files in a folder, of a disk or of a view."""
    if (place := located(folder)) is None:
        return {"driver": "file", "path": f"{folder}/"}
    view, key = place
    return view.name.spec(f"{key}/".removeprefix("/"))
