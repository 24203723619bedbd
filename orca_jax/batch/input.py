"""The input file: its fingerprint and its lines, read in constant memory."""

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from orca_jax.batch.rows import MAX_LINE_BYTES
from orca_jax.errors import ConfigError
from orca_jax.progress import Progress

CHUNK = 2**20  # bytes
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class InputFile:
    """An input file after a complete first reading."""

    path: Path
    sha256: str
    size: int  # bytes
    num_lines: int  # including a last line without a line break


def check_readable(path: Path) -> None:
    """Refuse an unreadable input before an output is created. Raises ConfigError."""
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="input") from None
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(
            f"{path} is not a regular file; it is read twice, so it must be a file on disk", param="input"
        )
    if status.st_size == 0:
        raise ConfigError(f"{path} is empty; it must contain one request per line", param="input")


def examine(path: Path, progress: Progress) -> InputFile:
    """Read the file once, in constant memory, for its fingerprint and its number of lines.

    Raises:
        ConfigError: the file cannot be read.
    """
    digest, size, num_lines, last = hashlib.sha256(), 0, 0, b"\n"
    try:
        with path.open("rb", buffering=0) as file:
            total = os.fstat(file.fileno()).st_size
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                size += len(chunk)
                num_lines += chunk.count(b"\n")
                last = chunk[-1:]
                progress(min(size, total), total)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param="input") from None
    return InputFile(path, digest.hexdigest(), size, num_lines + (last != b"\n"))


def read_lines(file: InputFile) -> Iterator[bytes | None]:
    """The lines without their line breaks; None for a line longer than `MAX_LINE_BYTES`.

    Raises:
        ConfigError: the file became shorter since it was examined.
    """
    with file.path.open("rb", buffering=CHUNK) as opened:
        for number in range(file.num_lines):
            line = opened.readline(MAX_LINE_BYTES + 2)
            if not line:
                raise ConfigError(f"{file.path} became shorter while it was read", param="input")
            if number == 0:
                line = line.removeprefix(BYTE_ORDER_MARK)
            is_whole = line.endswith(b"\n")
            text = line.removesuffix(b"\n").removesuffix(b"\r")
            if not is_whole:
                is_whole = not _skip_rest(opened)
            yield text if is_whole and len(text) <= MAX_LINE_BYTES else None


def _skip_rest(file: BinaryIO) -> bool:
    """Move to the start of the next line. Returns True if this skips anything."""
    has_skipped = False
    while part := file.readline(CHUNK):
        has_skipped = True
        if part.endswith(b"\n"):
            break
    return has_skipped
