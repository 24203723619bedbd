"""Pages as files, in a folder for each model and each form of its cache.

    DIRECTORY/<identity>/<first byte of digest>/<digest>-<group>-<depth>.kv

A file is private, and whole or absent (`helpers/cache_files.py`). Its content is:

    8 bytes   "ORCA-KV" and the version of the format
    32 bytes  identity: SHA-256 of everything that the numbers follow from, beside the tokens
    32 bytes  digest of the tokens of the page and of all before it, of salt and adapter
    2 bytes   group of layers; like the next one, the lowest byte first
    4 bytes   depth: pages before this one
    rest      the numbers, as `blocks.py` orders them

Several processes of one user may share a folder. One may remove a file that another one lists: its read then fails, and
the page is computed.
"""

import contextlib
import os
import re
import shutil
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock, Thread
from typing import NamedTuple

from orca_jax.exec.tiers.base import PageName, StoredPage
from orca_jax.helpers.cache_files import read_file, refusal, write_file
from orca_jax.values.errors import ConfigError, system_message

MAGIC = b"ORCA-KV\x01"
_DIGEST = 32  # bytes of an identity, and of a digest
_HEADER = len(MAGIC) + 2 * _DIGEST + 2 + 4
_TRAILER = 40  # bytes that `write_file` adds
_NAME = re.compile(r"([0-9a-f]{64})-(\d{1,5})-(\d{1,10})\.kv")
_MINUTE = 60 * 10**9  # nanoseconds
_PART = ".part-"  # of a file that is being written
_PAUSE = 60.0  # seconds without writing after a failure


class _KeptFile(NamedTuple):
    """A file of the folder: its size, its depth, and the time of its last use in nanoseconds."""

    size: int
    depth: int
    used: int


class FileTier:
    """Pages in a directory.

    Args:
        directory: made for this user alone, if it is absent.
        identity: see the format; pages of another identity are in another folder, and stay as they are.
        most_bytes: bytes of the files of this identity.

    Raises:
        ConfigError: the directory cannot be used; `param` is "kv_disk".
    """

    def __init__(self, directory: str, identity: bytes, most_bytes: int) -> None:
        self._identity = identity
        self._most_bytes = most_bytes
        self._folder = _open(Path(directory), identity)
        self._lock = Lock()
        self._entries: OrderedDict[PageName, _KeptFile] = OrderedDict()
        self._scanning = Thread(target=self.scan, name="scan-pages", daemon=True)
        self._paused_until = 0.0
        self.num_bytes = 0

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def begin_scan(self) -> None:
        """List the files of the folder in a thread, while weights are read."""
        self._scanning.start()

    def await_scan(self) -> None:
        """Wait for the end of `begin_scan`."""
        self._scanning.join()

    def scan(self) -> None:
        """List the files of the folder again, and remove parts of files that a killed process left."""
        found: list[tuple[PageName, _KeptFile]] = []
        for entry in _files(self._folder):
            match = _NAME.fullmatch(entry.name)
            with contextlib.suppress(OSError):  # removed by another process
                status = entry.stat(follow_symlinks=False)
                if match is not None:
                    name = int(match[2]), bytes.fromhex(match[1])
                    found.append(
                        (name, _KeptFile(status.st_size, int(match[3]), status.st_mtime_ns))
                    )
                elif entry.name.startswith(_PART):
                    _remove_part(entry, status)
        # a beginning of a text is used whenever its continuation is: it stays longer
        found.sort(key=lambda each: (each[1].used // _MINUTE, -each[1].depth))
        with self._lock:
            self._entries = OrderedDict(found)
            self.num_bytes = sum(entry.size for _, entry in found)
        self._make_room(0)

    def write(self, page: StoredPage) -> None:
        """Keep a page, unless a write has failed within the last minute. Raises OSError."""
        size = _HEADER + page.num_bytes + _TRAILER
        if page.name in self._entries or size > self._most_bytes:
            return
        if time.monotonic() < self._paused_until:
            return
        self._make_room(size)
        path = self._path(page.name, page.depth)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_file(path, self._header(page.name, page.depth), *page.payload)
        except OSError:
            self._paused_until = time.monotonic() + _PAUSE
            raise
        with self._lock:
            if page.name not in self._entries:
                self.num_bytes += size
            self._entries[page.name] = _KeptFile(size, page.depth, time.time_ns())

    def read(self, name: PageName) -> bytes:
        """The payload of a page.

        Raises:
            OSError: the file is gone or cannot be read.
            ValueError: the file is damaged, or is not what its name says.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ValueError("the page is gone")
        path = self._path(name, entry.depth)
        try:
            content = read_file(path)
            if content[:_HEADER] != self._header(name, entry.depth):
                raise ValueError("its header is that of another page")
        except (OSError, ValueError):
            self._forget(name)
            raise
        return content[_HEADER:]

    def touch(self, names: Iterable[PageName]) -> None:
        """Make pages the most recently used ones, also for later starts."""
        now = time.time_ns()
        stale: list[Path] = []
        with self._lock:
            for name in names:
                entry = self._entries.get(name)
                if entry is None:
                    continue
                self._entries.move_to_end(name)
                if now - entry.used > _MINUTE:
                    self._entries[name] = entry._replace(used=now)
                    stale.append(self._path(name, entry.depth))
        for path in stale:
            with contextlib.suppress(OSError):
                os.utime(path)

    def clear(self) -> None:
        """Remove all pages of this identity."""
        for name in list(self._entries):
            self._forget(name)

    def _make_room(self, size: int) -> None:
        """Remove the least recently used files until so many bytes are free."""
        while self.num_bytes + size > self._most_bytes:
            with self._lock:
                oldest = next(iter(self._entries), None)
            if oldest is None:
                return
            self._forget(oldest)

    def _forget(self, name: PageName) -> None:
        """Remove a file."""
        with self._lock:
            entry = self._entries.pop(name, None)
            if entry is None:
                return
            self.num_bytes -= entry.size
        with contextlib.suppress(OSError):
            self._path(name, entry.depth).unlink()

    def _header(self, name: PageName, depth: int) -> bytes:
        group, digest = name
        numbers = group.to_bytes(2, "little") + depth.to_bytes(4, "little")
        return MAGIC + self._identity + digest + numbers

    def _path(self, name: PageName, depth: int) -> Path:
        group, digest = name
        text = digest.hex()
        return self._folder / text[:2] / f"{text}-{group}-{depth}.kv"


def _open(directory: Path, identity: bytes) -> Path:
    """The folder of an identity, made for this user alone. Raises ConfigError."""
    folder = directory / identity.hex()[:32]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if reason := refusal(directory):
            raise _refused(directory, reason)
        folder.mkdir(mode=0o700, exist_ok=True)
        if reason := refusal(folder):
            raise _refused(folder, reason)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise _refused(folder, "this process cannot write to it")
    except FileExistsError:
        raise _refused(directory, "it is not a directory") from None
    except OSError as error:
        raise _refused(directory, system_message(error)) from None
    return folder


def _refused(directory: Path, reason: str) -> ConfigError:
    message = f"kv_disk: {directory} cannot be used: {reason}; give a directory of this user alone"
    return ConfigError(message, param="kv_disk")


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    """The entries of the folders in a folder that this user alone can change."""
    with os.scandir(folder) as outer:
        places = [Path(entry.path) for entry in outer if entry.is_dir(follow_symlinks=False)]
    for place in places:
        if refusal(place):
            continue
        with contextlib.suppress(OSError), os.scandir(place) as inner:
            yield from inner


def _remove_part(entry: os.DirEntry[str], status: os.stat_result) -> None:
    """Remove the folder of an unfinished file, unless a process may still write it."""
    if time.time_ns() - status.st_mtime_ns > _MINUTE:
        shutil.rmtree(entry.path, ignore_errors=True)
