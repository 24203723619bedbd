"""Files of the compile cache. They are machine code: each must be whole, and no other user may have written it.

A file ends with the digest of its name and its content, and with the length of the content. It is read into memory, not
mapped: a mapped file that is cut while it is read ends the process.
"""

import contextlib
import hashlib
import logging
import os
import stat
import tempfile
from collections.abc import Buffer
from pathlib import Path

from orca_jax.values.checks import distrust

logger = logging.getLogger(__name__)

_FOLDER = "private"
# bytes, at the end of a file
_DIGEST = hashlib.sha256().digest_size
_LENGTH = 8


def own_folder(directory: str) -> Path:
    """Return the folder of the cache within a directory. It is made, for this user alone, if that is possible."""
    folder = Path(directory) / _FOLDER
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def refusal(folder: Path) -> str:
    """Return the reason why files in a folder must not be used; empty if they may, or if there is no folder."""
    try:
        status = folder.lstat()
    except OSError:
        return ""
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory"
    return distrust(status)


def remove_distrusted(folder: Path) -> None:
    """Remove the files of a folder that others could have written, with a warning. Raises OSError if one stays."""
    with os.scandir(folder) as entries:
        files = [entry for entry in entries if not entry.is_dir(follow_symlinks=False)]
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # removed by another process
            if reason := distrust(file.stat(follow_symlinks=False)):
                os.unlink(file.path)
                logger.warning("removed %s from the compile cache: %s", file.path, reason)


def read_file(path: Path) -> bytes:
    """Return the content of a file from `write_file`.

    Raises:
        OSError: it is absent or cannot be read.
        ValueError: it is damaged, or others could have written it.
    """
    # the open of a FIFO must not wait
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if reason := distrust(status):
            raise ValueError(reason)
        size = status.st_size - _DIGEST - _LENGTH
        if not stat.S_ISREG(status.st_mode) or size < 0:
            raise ValueError("it is not whole")
        file.seek(size)
        end = file.read(_DIGEST + _LENGTH)
        if end[_DIGEST:] != size.to_bytes(_LENGTH):  # before anything large is read
            raise ValueError("it is not whole")
        file.seek(0)
        content = file.read(size)
    if end != _end(path, content):
        raise ValueError("it is not what was written")
    return content


def write_file(path: Path, *content: Buffer) -> None:
    """Write pieces as a file that `read_file` accepts, and replace an earlier one by it at once. Raises OSError."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".part-") as folder:
        beside = Path(folder) / path.name
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
            for piece in content:
                file.write(piece)
            file.write(_end(path, *content))
            file.flush()
            # else a crash of the machine may leave the name without the content
            os.fsync(file.fileno())
        beside.replace(path)


def _end(path: Path, *content: Buffer) -> bytes:
    digest = hashlib.sha256(f"{path.name}\0".encode())
    size = 0
    for piece in content:
        digest.update(piece)
        size += memoryview(piece).nbytes
    return digest.digest() + size.to_bytes(_LENGTH)
