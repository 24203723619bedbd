"""The header of a GGUF file: its metadata and the places of its tensors, read and compared with the size of the file.

The format is described in docs/gguf.md of ggml. The reader of the library `gguf` maps the file, and a process that
reads a mapped file beyond its end is killed (SIGBUS). Here a file that is cut meanwhile is an error.
"""

import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from orca_jax.helpers.file_state import FileState
from orca_jax.values.cache_spec import ceil_div
from orca_jax.values.checks import open_regular, short
from orca_jax.values.errors import ConfigError, reason_of

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAX_HEADER_BYTES = 256 * 2**20  # a vocabulary of 262,144 tokens has 20 MB
MAX_FIELDS = 10_000  # of the metadata
MAX_TENSORS = 500_000
MAX_LISTED = 4096  # values of a list in a header that is kept; vocabularies are longer
MAX_WORDS = 2**20  # values of a list in metadata that are read once
MAX_TEXTS = 2**21  # in all lists of a header: 262,144 tokens with 514,906 merges are usual
_MAX_DIMENSIONS = 4  # as in ggml
_VERSIONS = (2, 3)
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_FORMATS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
"""Types of numbers, in the words of `struct`."""
_FLOAT32 = 6
_TEXT = 8
_LIST = 9


class GgufTensor(NamedTuple):
    """A tensor of a file.

    Attributes:
        shape: rows first, as in safetensors.
        kind: type of its values.
        begin: its first byte in the file.
        row_bytes: bytes of a row in the file.
        part: index of the file among the parts of a model.
    """

    shape: tuple[int, ...]
    kind: "GGMLQuantizationType"
    begin: int
    row_bytes: int
    part: int = 0


class GgufHeader(NamedTuple):
    """The metadata of a file by their keys, its tensors by their names, and the states of its parts.

    Of a list with more than `MAX_LISTED` values, the metadata have a text with their number.
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    states: tuple[FileState, ...]


class _Damaged(Exception):
    """The file is not GGUF, or cannot be read as such."""


@dataclass
class _Cursor:
    """Reads an open file from its begin on, in parts, up to a limit."""

    descriptor: int
    end: int
    most_listed: int
    place: int = 0  # in the file, of the first byte that is not in `_held`
    num_texts: int = 0  # in lists
    _held: memoryview = field(default_factory=lambda: memoryview(b""))

    @property
    def position(self) -> int:
        return self.place - len(self._held)

    def take(self, count: int) -> memoryview:
        if count > len(self._held):
            if count > self.end - self.position:
                raise _Damaged(
                    f"its header needs {self.position + count} bytes, and {self.end} can be read"
                )
            more = os.pread(self.descriptor, max(2**20, count), self.place)
            self.place += len(more)
            self._held = memoryview(bytes(self._held) + more)
            if count > len(self._held):
                raise _Damaged("it ends within its header")
        found = self._held[:count]
        self._held = self._held[count:]
        return found

    def number(self, code: str) -> Any:
        """One number, as `struct` names its type."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        return str(self.take(int.from_bytes(self.take(8), "little")), "utf-8")

    def value(self, kind: int, key: str) -> Any:
        """A value of the metadata."""
        if kind == _TEXT:
            return self.text()
        if kind == _LIST:
            return self._list(key)
        if kind not in _FORMATS:
            raise _Damaged(f"{short(key)} has the unknown type {kind}")
        value = self.number(_FORMATS[kind])
        if kind == _FLOAT32:
            return _shortest(value)
        return value

    def _list(self, key: str) -> list[Any] | str:
        kind = self.number("I")
        count = self.number("Q")
        if kind != _TEXT and kind not in _FORMATS:
            raise _Damaged(f"{short(key)} is a list of values of the unknown type {kind}")
        if kind == _TEXT:
            self.num_texts += count
            if self.num_texts > MAX_TEXTS:
                raise _Damaged(
                    f"the lists up to {short(key)} have {self.num_texts} texts, at most {MAX_TEXTS} are read"
                )
        if count <= self.most_listed and kind == _TEXT:
            return [self.text() for _ in range(count)]
        if count <= self.most_listed:
            code = _FORMATS[kind]
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))
        if kind == _TEXT:
            for _ in range(count):  # each takes 8 bytes at least
                self.take(self.number("Q"))
        else:
            self.take(count * struct.calcsize(_FORMATS[kind]))
        return f"a list of {count} values"


def read_header(path: str | Path) -> GgufHeader:
    """Read the header of a file. It is kept while the file stays the same, since long vocabularies take a second.

    Of the first of several parts it has the tensors of all of them.

    Raises:
        ConfigError: the file cannot be read, is damaged, or was cut.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"{path} is not a file; give a GGUF file, a model directory or ORG/NAME", param="model"
        )
    state = path.stat()
    return _header(path, state.st_mtime_ns, state.st_size)


def read_fields(path: str | Path) -> Mapping[str, Any]:
    """Read the metadata of a file with their vocabularies. Raises ConfigError as `read_header` does."""
    path = Path(path)
    return _with_descriptor(path, lambda number: _read_fields(_cursor(number, MAX_WORDS))[0])


def parts_of(path: Path, header: GgufHeader) -> list[Path]:
    """The files of a model from its first one on. Raises ConfigError if `path` is another one of several."""
    count = header.fields.get("split.count", 1)
    number = header.fields.get("split.no", 0)
    if count in (0, 1):
        return [path]
    name = _PART.fullmatch(path.name)
    if (
        type(count) is not int
        or name is None
        or (int(name[2]), int(name[3]), number) != (1, count, 0)
    ):
        message = f"{path} is one of several parts: give the first one, NAME-00001-of-0000N.gguf, beside the others"
        raise ConfigError(message, param="model")
    return [
        path.with_name(f"{name[1]}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)
    ]


def read_vector(path: str | Path, tensor: GgufTensor) -> list[float]:
    """Read a vector in float32. Raises ConfigError if it is of another type, or cannot be read."""
    size = math.prod(tensor.shape)

    def read(descriptor: int) -> list[float]:
        if tensor.kind.name != "F32":
            raise _Damaged(f"a vector of factors is {tensor.kind.name}, and F32 is read")
        content = os.pread(descriptor, 4 * size, tensor.begin)
        if len(content) < 4 * size:
            raise _Damaged("it ends within a vector of factors")
        return list(struct.unpack(f"<{size}f", content))

    return _with_descriptor(Path(path), read)


@lru_cache(maxsize=1)
def _header(path: Path, changed: int, size: int) -> GgufHeader:
    header = _with_descriptor(path, _read)
    tensors = dict(header.tensors)
    states = [*header.states]
    for part, other in enumerate(parts_of(path, header)[1:], 1):
        found = _with_descriptor(other, _read)
        tensors |= {name: tensor._replace(part=part) for name, tensor in found.tensors.items()}
        states += found.states
    return header._replace(tensors=tensors, states=tuple(states))


def _with_descriptor[T](path: Path, read: Callable[[int], T]) -> T:
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            return read(file.fileno())
    except (_Damaged, OSError, UnicodeDecodeError) as error:
        reason = f"{error}; download it again"
        if isinstance(error, OSError):
            reason = reason_of(error)
        message = f"{path} cannot be read as GGUF: {reason}"
        raise ConfigError(message, param="model") from None


def _cursor(descriptor: int, most_listed: int) -> _Cursor:
    return _Cursor(descriptor, min(os.fstat(descriptor).st_size, MAX_HEADER_BYTES), most_listed)


def _read_fields(cursor: _Cursor) -> tuple[dict[str, Any], int]:
    """The metadata and the number of tensors."""
    if bytes(cursor.take(4)) != b"GGUF":
        raise _Damaged("it does not begin with GGUF")
    if (version := cursor.number("I")) not in _VERSIONS:
        known = f"{_VERSIONS} in the order little-endian"
        raise _Damaged(f"version {version} is not supported, only {known}")
    num_tensors = cursor.number("Q")
    num_fields = cursor.number("Q")
    if num_tensors > MAX_TENSORS or num_fields > MAX_FIELDS:
        limits = f"at most {MAX_TENSORS} tensors and {MAX_FIELDS} fields are read"
        raise _Damaged(f"its header lists {num_tensors} tensors and {num_fields} fields; {limits}")
    fields: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.text()
        kind = cursor.number("I")
        if key in fields:
            raise _Damaged(f"{short(key)} is listed twice")
        fields[key] = cursor.value(kind, key)
    return fields, num_tensors


def _read(descriptor: int) -> GgufHeader:
    cursor = _cursor(descriptor, MAX_LISTED)
    fields, num_tensors = _read_fields(cursor)
    found: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for _ in range(num_tensors):
        name = cursor.text()
        dimensions = cursor.number("I")
        if name in found or not 1 <= dimensions <= _MAX_DIMENSIONS:
            problem = "is listed twice" if name in found else f"has {dimensions} dimensions"
            raise _Damaged(f"tensor {short(name)} {problem}")
        shape = tuple(cursor.number("Q") for _ in range(dimensions))[::-1]
        found[name] = shape, cursor.number("I"), cursor.number("Q")
    alignment = fields.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _Damaged(f"general.alignment must be a power of two, got {short(alignment)}")
    begin = ceil_div(cursor.position, alignment) * alignment
    state = FileState.of(descriptor)
    tensors = {name: _tensor(name, entry, begin, state.size) for name, entry in found.items()}
    return GgufHeader(fields, tensors, (state,))


def _tensor(
    name: str, entry: tuple[tuple[int, ...], int, int], begin: int, size: int
) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # the import takes 0.3 s

    shape, number, offset = entry
    if 0 in shape:
        raise _Damaged(f"tensor {short(name)} of shape {list(shape)} has no values")
    try:
        kind = GGMLQuantizationType(number)
        values, num_bytes = GGML_QUANT_SIZES[kind]
    except (KeyError, ValueError):
        raise _Damaged(f"tensor {short(name)} has the unknown type {number}") from None
    if shape[-1] % values:
        stored = f"{kind.name} stores {values} together"
        raise _Damaged(f"tensor {short(name)} has {shape[-1]} columns, and {stored}")
    row_bytes = shape[-1] // values * num_bytes
    first = begin + offset
    if (end := first + math.prod(shape[:-1]) * row_bytes) > size:
        where = f"tensor {short(name)} ends at {end}"
        raise _Damaged(f"it has {size} bytes, and {where}: it was cut or changed")
    return GgufTensor(shape, kind, first, row_bytes)


def _shortest(value: float) -> float:
    """The shortest decimal number that is this float32, such as 1e-6."""
    import numpy as np  # a front end describes models without it

    return float(str(np.float32(value)))
