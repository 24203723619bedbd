"""Progress on standard error: bars on a terminal, else lines of text."""

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from orca_jax.console import LastingStream

type Progress = Callable[[int, int], None]
"""Called after each piece of work with the number of pieces done, and of all pieces."""


def bar(**options: Any) -> "tqdm[Any]":
    """Return tqdm's bar on standard error. It stops if standard error is closed, and the program continues."""
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
