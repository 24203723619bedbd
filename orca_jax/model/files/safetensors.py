"""The header of a safetensors file: read, not mapped, and compared with the size of the file.

A process that reads a mapped file beyond its end is killed (SIGBUS). If a file is cut meanwhile, a plain read raises an
error with the file's name.
"""

import json
import math
from typing import Any, NamedTuple

import numpy as np

from orca_jax.model.files.opened import OpenFile
from orca_jax.model.files.stripes import DTYPES, STORED_TYPES, FileMatrix
from orca_jax.values.checks import short, unique_keys

METADATA = "__metadata__"


class StoredTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        dtype: the type by its name in safetensors.
        shape: rows first.
        begin: its first byte in the file.
        file: the open file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    file: OpenFile

    def matrix(self, key: str) -> FileMatrix:
        """The rows of a tensor of floating-point numbers; a vector is one row."""
        *outer, columns = self.shape or (1,)
        dtype = DTYPES[self.dtype]
        return FileMatrix(key, math.prod(outer), columns, dtype, self.file, self.begin)

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Some rows of a matrix, in the type of the file. Raises OSError."""
        values = np.empty((stop - start, *self.shape[1:]), STORED_TYPES[self.dtype])
        if values.size:
            self.file.read_into(self.begin + start * values[0].nbytes, values)
        return values

    def all(self) -> np.ndarray:
        """All values. Raises OSError."""
        values = np.empty(math.prod(self.shape), STORED_TYPES[self.dtype])
        if values.size:
            self.file.read_into(self.begin, values)
        return values.reshape(self.shape)


def read_header(file: OpenFile, limit: int) -> tuple[dict[str, StoredTensor], int]:
    """Read the tensors of an open file, by their names, and the bytes of its header.

    Args:
        file: the file.
        limit: most bytes of the header.

    Raises:
        OSError: the header is larger or damaged, a tensor is listed twice, or the file has another size than the header
            says, for example since a download was cut.
    """
    size = file.size
    first = file.read(0, 8)
    length = int.from_bytes(first, "little")
    if size is not None and (len(first) < 8 or length > size - 8):
        raise OSError(
            f"it has {size} bytes, and its header needs {8 + length}: it was cut, or is not a safetensors file"
        )
    if length > limit:
        raise OSError(f"its header has {length} bytes, and at most {limit} are read")
    try:
        header = json.loads(file.read(8, length).decode(), object_pairs_hook=unique_keys)
        entries = {name: _tensor(name, entry) for name, entry in header.items() if name != METADATA}
    except (AttributeError, ValueError, RecursionError) as error:
        raise OSError(f"its header is damaged: {error}") from None
    place = 0
    for name, ((begin, end), _) in sorted(entries.items(), key=lambda item: item[1][0]):
        if begin != place:
            raise OSError(
                f"its header is damaged: {short(name)} begins at {begin}, behind data that end at {place}"
            )
        place = end
    if not file.ends_at(8 + length + place):
        found = "other bytes" if size is None else f"{size} bytes"
        raise OSError(
            f"it has {found}, and by its header {8 + length + place}: it was cut or changed"
        )
    tensors = {
        name: StoredTensor(dtype, shape, 8 + length + begin, file)
        for name, ((begin, _), (dtype, shape)) in entries.items()
    }
    return tensors, length


def _tensor(name: str, entry: Any) -> tuple[tuple[int, int], tuple[str, tuple[int, ...]]]:
    """The bytes, the type and the shape of a tensor. Raises ValueError."""
    name.encode()  # half of a surrogate pair cannot be written anywhere: UnicodeEncodeError
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{short(name)} has no dtype, shape and data_offsets") from None
    numbers = (*shape, begin, end)
    if not isinstance(dtype, str) or not all(
        type(number) is int and 0 <= number < 2**63 for number in numbers
    ):
        raise ValueError(f"{short(name)} has a wrong dtype, shape or data_offsets")
    dtype.encode()
    known = STORED_TYPES.get(dtype)
    if end < begin or (known is not None and end - begin != math.prod(shape) * known.itemsize):
        raise ValueError(
            f"{short(name)} has {end - begin} bytes, which are not its shape {short(list(shape))}"
        )
    return (begin, end), (dtype, shape)
