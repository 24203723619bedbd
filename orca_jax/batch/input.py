"""The input file: its fingerprint and its lines, read in constant memory."""

import hashlib
import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from orca_jax.batch.rows import MAX_LINE_BYTES
from orca_jax.helpers.console import Progress
from orca_jax.values.errors import ConfigError, reason_of

CHUNK = 2**20  # bytes
DIGEST = 16  # bytes
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class InputFile:
    """An input file after a complete first reading."""

    path: Path
    sha256: str
    size: int  # bytes
    num_lines: int  # including a last line without a line break
    # digests of `DIGEST` bytes, one per `CHUNK` bytes of the file
    chunks: bytes = field(repr=False)


def check_readable(path: Path) -> None:
    """Refuse an unreadable input before an output is created. Raises ConfigError."""
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}", param="input") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(
            f"{path} is not a regular file; it is read twice, so it must be a file on disk",
            param="input",
        )
    if status.st_size == 0:
        raise ConfigError(f"{path} is empty; it must contain one request per line", param="input")


def examine(path: Path, progress: Progress) -> InputFile:
    """Read the file once, in constant memory, for its fingerprints and its number of lines.

    Raises:
        ConfigError: the file cannot be read.
    """
    digest = hashlib.sha256()
    chunks = bytearray()
    size = 0
    num_lines = 0
    last = b"\n"
    try:
        with path.open("rb", buffering=CHUNK) as file:
            total = os.fstat(file.fileno()).st_size
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                chunks += _digest(chunk)
                size += len(chunk)
                num_lines += chunk.count(b"\n")
                last = chunk[-1:]
                progress(min(size, total), total)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}", param="input") from None
    return InputFile(path, digest.hexdigest(), size, num_lines + (last != b"\n"), bytes(chunks))


def read_lines(file: InputFile) -> Iterator[bytes | None]:
    """The lines without their line breaks; None for a line longer than `MAX_LINE_BYTES`.

    Raises:
        ConfigError: the file changed since it was examined. No changed line is yielded.
    """
    with io.BufferedReader(_UnchangedFile(file), CHUNK) as opened:
        for number in range(file.num_lines):
            line = opened.readline(MAX_LINE_BYTES + 2)
            if number == 0:
                line = line.removeprefix(BYTE_ORDER_MARK)
            is_whole = line.endswith(b"\n")
            text = line.removesuffix(b"\n").removesuffix(b"\r")
            if not is_whole:
                is_whole = not _skip_rest(opened)
            yield text if is_whole and len(text) <= MAX_LINE_BYTES else None


class _UnchangedFile(io.RawIOBase):
    """The bytes of an examined file, each chunk compared with its digest before it is returned."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._opened = file.path.open("rb", buffering=0)
        self._digests = iter(
            [file.chunks[i : i + DIGEST] for i in range(0, len(file.chunks), DIGEST)]
        )
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not self._rest:
            self._rest = memoryview(self._next_chunk())
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        self._opened.close()
        super().close()

    def _next_chunk(self) -> bytes:
        digest = next(self._digests, None)
        chunk = _read_chunk(self._opened)
        if (_digest(chunk) if chunk else None) != digest:
            raise ConfigError(
                f"{self._file.path} was changed while it was read; the rows written so far belong to its old content: "
                "restore that and run the same command again to resume, or start again with --overwrite",
                param="input",
            )
        return chunk


def _digest(chunk: bytes) -> bytes:
    return hashlib.blake2b(chunk, digest_size=DIGEST).digest()


def _read_chunk(file: io.FileIO) -> bytes:
    """`CHUNK` bytes, or fewer at the end of the file."""
    parts: list[bytes] = []
    left = CHUNK
    while left and (part := file.read(left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _skip_rest(file: BinaryIO) -> bool:
    """Move to the start of the next line. Returns True if this skips anything."""
    has_skipped = False
    while part := file.readline(CHUNK):
        has_skipped = True
        if part.endswith(b"\n"):
            break
    return has_skipped
