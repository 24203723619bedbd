"""The output file: owned by one process at a time, with whole rows only, which count once they are on disk."""

import fcntl
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from orca_jax.batch.answers import WrittenRow, read_row
from orca_jax.batch.record import REMEDY, sync_directory
from orca_jax.errors import ConfigError

CHUNK = 2**20  # bytes
ROW_OVERHEAD = 256  # bytes of memory for each row, in addition to its text


class OutputFile:
    """An output file locked for this process until it is closed.

    Raises:
        ConfigError: it cannot be opened, or another process has locked it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}", param="output") from None
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.descriptor)
            raise ConfigError(
                f"another process is writing to {path}; wait until it ends, or choose another output", param="output"
            ) from None

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self.descriptor).st_size

    def clear(self) -> None:
        """Remove all rows."""
        self._cut(0)
        sync_directory(self.path.parent)

    def recover(self) -> Iterator[WrittenRow]:
        """Remove an incomplete last row, left by a killed process, and yield the rows.

        Raises:
            ConfigError: a line is not a row.
        """
        self._cut(self._end_of_rows())
        with self.path.open("rb", buffering=CHUNK) as file:
            for number, line in enumerate(file, start=1):
                row = read_row(line)
                if row is None:
                    message = f"line {number} of {self.path} is not a row of a batch output; {REMEDY}"
                    raise ConfigError(message, param="output")
                yield row

    def close(self) -> None:
        """Unlock and close the file."""
        os.close(self.descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def _cut(self, size: int) -> None:
        if size < self.size:
            os.ftruncate(self.descriptor, size)
            os.fsync(self.descriptor)


class Writer:
    """Appends rows in a thread of its own, so that a busy disk does not delay the computation.

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
            view = memoryview(data)
            while view:
                view = view[os.write(self._output.descriptor, view) :]
            os.fsync(self._output.descriptor)
        except OSError as error:
            self.error = OSError(error.errno, error.strerror, str(self._output.path))
        self.seconds += time.perf_counter() - start
        with self._lock:
            self.backlog -= len(data)


class InputOrder:
    """Holds each row back until all rows before it are there."""

    def __init__(self, first: int) -> None:
        self._next = first  # number of the line to write next
        self._rows: dict[int, bytes] = {}
        self.held = 0  # bytes of rows held back

    def add(self, line: int, row: bytes) -> bytes:
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

    def add(self, line: int, row: bytes) -> bytes:
        """Add a row; return the rows that can be written now."""
        return row
