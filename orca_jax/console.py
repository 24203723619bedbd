"""Standard output and standard error in spite of failures: a full disk, or the early end of a reader such as `head`."""

import errno
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

logger = logging.getLogger(__name__)


class LastingStream:
    """A stream without exceptions: it logs its first error, and drops everything after it.

    Args:
        stream: the stream to write to.
        name: its name in the log; empty: the error is not logged, since the log goes to this stream.
        replaces_file: True to redirect the descriptor to /dev/null after an error. The interpreter writes the rest of
            its buffer at exit, and would end with code 120 otherwise.
    """

    def __init__(self, stream: TextIO, name: str = "", *, replaces_file: bool = False) -> None:
        self._stream = stream
        self._name = name
        self._replaces_file = replaces_file
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write the text, unless an earlier write has failed."""
        if self.error is None:
            try:
                return self._stream.write(text)
            except OSError as error:
                self._stop(error)
        return len(text)

    def flush(self) -> None:
        """Write the buffer, unless an earlier write has failed."""
        if self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._stop(error)

    @property
    def is_lost(self) -> bool:
        """True if text was lost against the will of the reader; by closing a pipe early, it declines the rest."""
        return self.error is not None and self.error.errno != errno.EPIPE

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _stop(self, error: OSError) -> None:
        self.error = error
        if self._replaces_file:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        if self._name:
            level = logging.WARNING if self.is_lost else logging.INFO
            logger.log(level, "%s cannot be written: %s; it is left out from now on", self._name, error.strerror)


@contextmanager
def lasting_output() -> Iterator[LastingStream]:
    """Keep the block running if standard output or standard error fails or is closed. Yield standard output."""
    _open_missing()
    before = sys.stdout, sys.stderr
    out = LastingStream(sys.stdout, "standard output", replaces_file=_has_file(sys.stdout))
    err = LastingStream(sys.stderr, replaces_file=_has_file(sys.stderr))
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def _open_missing() -> None:
    """Open /dev/null for closed standard files: the next file or socket would get the descriptor of one of them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
    # The streams of closed files are None.
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))


def _has_file(stream: TextIO) -> bool:
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError, AttributeError):  # replaced by the program, such as a notebook
        return False
