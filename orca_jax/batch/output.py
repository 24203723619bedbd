"""The output file: one owner at a time, rows whole or absent, on the disk before they count."""

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
ROW_OVERHEAD = 256  # bytes of memory that a row takes beside its own


class OutputFile:
    """An output that this process alone writes to, until it is closed.

    Raises:
        ConfigError: it cannot be opened, or another process has it.
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
            raise ConfigError(f"another process is writing {path}", param="output") from None

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self.descriptor).st_size

    def clear(self) -> None:
        """Begin again."""
        self._cut(0)
        sync_directory(self.path.parent)

    def recover(self) -> Iterator[WrittenRow]:
        """Cut off what a killed process left half written, and yield the whole rows.

        Raises:
            ConfigError: something in it is no row.
        """
        self._cut(self._end_of_rows())
        with self.path.open("rb", buffering=CHUNK) as file:
            for number, line in enumerate(file, start=1):
                row = read_row(line)
                if row is None:
                    message = f"line {number} of {self.path} is no row of a batch; {REMEDY}"
                    raise ConfigError(message, param="output")
                yield row

    def close(self) -> None:
        """Let others write."""
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
    """Appends rows in a thread of its own, so that nobody computes less while a disk is busy.

    What has come since the last time goes out in one write and is then forced onto the disk.

    Args:
        output: the file, which stays open.
        on_progress: called in the writer's thread after every write, and when it fails.

    Attributes:
        error: why nothing more is written; None while all is well.
        seconds: spent in writing and forcing.
        backlog: bytes that were put and are not on the disk.
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
        """Whole rows, to follow those before."""
        with self._lock:
            self.backlog += len(rows)
        self._queue.put(rows)

    def finish(self) -> None:
        """Wait until all is on the disk. Raises OSError where it is not."""
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
    """Holds rows back until all before them are there."""

    def __init__(self, first: int) -> None:
        self._next = first  # line whose row is written next
        self._rows: dict[int, bytes] = {}
        self.held = 0  # bytes

    def add(self, line: int, row: bytes) -> bytes:
        """A row that is ready; returns what may be written now."""
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
    """Lets every row pass."""

    held = 0

    def add(self, line: int, row: bytes) -> bytes:
        """A row that is ready; returns what may be written now."""
        return row
