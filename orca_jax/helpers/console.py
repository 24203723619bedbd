"""Standard output and standard error: in spite of failures such as a full disk or the end of a reader, and progress."""

import errno
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

type Progress = Callable[[int, int], None]
"""Called after each piece of work with the number of pieces done, and of all pieces."""


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
            logger.log(
                level,
                "%s cannot be written: %s; it is left out from now on",
                self._name,
                error.strerror,
            )


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


def bar(**options: Any) -> "tqdm[Any]":
    """Return tqdm's bar on standard error. It stops if standard error is closed, and the program continues."""
    from tqdm import tqdm

    stream = None if sys.stderr is None else LastingStream(sys.stderr)
    return tqdm(file=stream, **{"disable": stream is None, **options})


def has_terminal() -> bool:
    """Return True if standard error is a terminal. In a file, the control characters of bars join all lines to one."""
    return sys.stderr is not None and sys.stderr.isatty()


def line_without_bars(text: str) -> None:
    """Print a line on standard error, unless bars are drawn there."""
    if sys.stderr is not None and not has_terminal():
        print(text, file=LastingStream(sys.stderr), flush=True)


def progress_bar(label: str, enabled: bool) -> Progress:
    """Return a function that draws a bar on a terminal; the bar disappears after the last piece."""
    enabled = enabled and has_terminal()
    shown: tqdm[Any] | None = None

    def show(done: int, total: int) -> None:
        nonlocal shown
        if shown is None:
            shown = bar(total=total, desc=label, disable=not enabled, leave=False)
        shown.update(done - shown.n)
        if done == total:
            shown.close()
            shown = None

    return show
