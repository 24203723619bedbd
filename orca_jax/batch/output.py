"""The output file: owned by one process at a time, with whole rows only, which count once they are on disk."""

import contextlib
import fcntl
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from orca_jax.batch.answers import WrittenRow, read_row
from orca_jax.batch.record import (
    REMEDY,
    RunRecord,
    check_same,
    record_path,
    sync_directory,
    write_record,
)
from orca_jax.values.errors import ConfigError, reason_of

CHUNK = 2**20  # bytes
ROW_OVERHEAD = 256  # bytes of memory for each row, in addition to its text


class OutputFile:
    """An output file locked for this process until it is closed.

    Nothing on disk changes before `begin`, except that a missing file is created, empty, for the lock.

    Args:
        path: a regular file, or a name that does not exist.
        overwrite: start again without the rows of the file; `begin` renames it to `old_path`.

    Raises:
        ConfigError: it is not a regular file, it cannot be opened, or another process has locked it.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        check_regular(path, "output")
        self.path = path
        self._overwrites = overwrite
        self._record: RunRecord | None = None  # to be written; None: the record on disk stays
        self._has_begun = False
        self._is_new = not path.exists()
        if not path.parent.is_dir():
            raise ConfigError(f"{path.parent} is not a directory; create it first", param="output")
        if not os.access(path.parent, os.W_OK):
            message = f"{path} cannot be written: no files can be created in its directory"
            raise ConfigError(message, param="output")
        self.descriptor = self._open()

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self.descriptor).st_size

    def recover(self, record: RunRecord) -> Iterator[WrittenRow]:
        """Yield the rows of earlier processes, without an incomplete last row left by a killed process.

        Raises:
            ConfigError: a line is not a row, or the rows belong to another run than `record`.
        """
        if self._overwrites or not self.size:
            self._record = record
            return
        check_same(record, record_path(self.path))
        left = self._end_of_rows()
        with self.path.open("rb", buffering=CHUNK) as file:
            for number, line in enumerate(file, start=1):
                left -= len(line)
                if left < 0:
                    return
                row = read_row(line)
                if row is None:
                    message = (
                        f"line {number} of {self.path} is not a row of a batch output; {REMEDY}"
                    )
                    raise ConfigError(message, param="output")
                yield row

    def begin(self) -> None:
        """Make the file ready to append to, at the first row to write; later calls have no effect.

        An output to overwrite is renamed, the record of a new run is written, and an incomplete last row is removed.

        Raises:
            OSError: a file cannot be renamed or written.
        """
        if self._has_begun:
            return
        if self._overwrites and self.size:
            self._set_aside()
        if self._record is not None:
            write_record(self._record, record_path(self.path))
        end = self._end_of_rows()
        if end < self.size:
            os.ftruncate(self.descriptor, end)
            os.fsync(self.descriptor)
        self._has_begun = True

    def close(self) -> None:
        """Unlock and close the file; remove it if it was created here and is still empty."""
        is_unused = self._is_new and not self._has_begun and not self.size
        if is_unused and _is_at(self.descriptor, self.path):
            self.path.unlink()
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end_of_rows(self) -> int:
        """The position after the last line break."""
        end = self.size
        while end:
            start = max(0, end - CHUNK)
            found = os.pread(self.descriptor, end - start, start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
        return 0

    def _open(self) -> int:
        """Open and lock the file that has the name. Raises ConfigError."""
        while True:
            try:
                descriptor = os.open(
                    self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666
                )
            except OSError as error:
                raise ConfigError(
                    f"{self.path} cannot be written: {reason_of(error)}", param="output"
                ) from None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                message = f"{self.path} cannot be locked: {error.strerror}; choose an output on another file system"
                if isinstance(error, BlockingIOError):
                    message = f"another process is writing to {self.path}; wait until it ends, or choose another output"
                raise ConfigError(message, param="output") from None
            if _is_at(descriptor, self.path):
                return descriptor
            # another process has renamed or removed the file before it was locked here
            os.close(descriptor)

    def _set_aside(self) -> None:
        """Rename the file and its record, and continue with an empty file of the same permissions."""
        # a symbolic link stays, and its target is renamed
        place = Path(os.path.realpath(self.path))
        place.rename(old_path(place))
        with contextlib.suppress(FileNotFoundError):
            record_path(self.path).rename(record_path(old_path(self.path)))
        fresh = os.open(
            place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fresh, stat.S_IMODE(os.fstat(self.descriptor).st_mode))
        os.close(self.descriptor)
        self.descriptor = fresh
        sync_directory(place.parent)


def old_path(output: Path) -> Path:
    """The new name of an output that is overwritten."""
    return output.with_name(output.name + ".old")


def check_regular(path: Path, param: str) -> None:
    """Refuse a file that rows cannot be appended to and read from again. Raises ConfigError."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {reason_of(error)}", param=param) from None
    if not stat.S_ISREG(status.st_mode):
        message = "is not a regular file; rows are appended and read again to resume, so give the name of a file"
        raise ConfigError(f"{path} {message}", param=param)
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed
            if os.path.samestat(status, os.fstat(descriptor)):
                message = "is standard output or standard error, for the summary; give the name of another file"
                raise ConfigError(f"{path} {message}", param=param)


def _is_at(descriptor: int, path: Path) -> bool:
    """True if the open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


class Writer:
    """Appends rows in its own thread, so that a busy disk does not delay the computation.

    All rows put since the last write are written at once and then forced to disk (`fsync`).

    Args:
        output: the file; it stays open.
        on_progress: called in the writer's thread after every write, also after a failed one.

    Attributes:
        error: the reason for a failed write, after which nothing is written; else None.
        seconds: time spent in writing and `fsync`.
        backlog: bytes that are not yet on disk.
    """

    def __init__(self, output: OutputFile, on_progress: Callable[[], object]) -> None:
        self.error: OSError | None = None
        self.seconds = 0.0
        self.backlog = 0
        self._output = output
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="writer")
        self._thread.start()

    def put(self, rows: bytes) -> None:
        """Append whole rows."""
        with self._lock:
            self.backlog += len(rows)
        self._queue.put(rows)

    def finish(self) -> None:
        """Wait until all rows are on disk. Raises OSError if a write failed."""
        self._queue.put(None)
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        is_open = True
        while is_open:
            items = [self._queue.get()]
            while not self._queue.empty():
                items.append(self._queue.get())
            is_open = None not in items
            data = b"".join(item for item in items if item is not None)
            if self.error is None and data:
                self._write(data)
                self._on_progress()

    def _write(self, data: bytes) -> None:
        start = time.perf_counter()
        try:
            self._output.begin()
            view = memoryview(data)
            while view:
                view = view[os.write(self._output.descriptor, view) :]
            os.fsync(self._output.descriptor)
        except OSError as error:
            self.error = OSError(
                error.errno, error.strerror, error.filename or str(self._output.path)
            )
        self.seconds += time.perf_counter() - start
        with self._lock:
            self.backlog -= len(data)


class InputOrder:
    """Holds each row back until all rows before it are there."""

    def __init__(self, first: int) -> None:
        self._next = first  # number of the line to write next
        self._rows: dict[int, bytes] = {}
        self.held = 0  # bytes of rows held back

    def add_row(self, line: int, row: bytes) -> bytes:
        """Add a row; return the rows that can be written now."""
        if line != self._next:
            self._rows[line] = row
            self.held += len(row) + ROW_OVERHEAD
            return b""
        ready = [row]
        self._next += 1
        while (following := self._rows.pop(self._next, None)) is not None:
            self.held -= len(following) + ROW_OVERHEAD
            ready.append(following)
            self._next += 1
        return b"".join(ready)


class AsFinished:
    """Passes every row on at once."""

    held = 0

    def add_row(self, line: int, row: bytes) -> bytes:
        """Add a row; return the rows that can be written now."""
        return row
