"""Progress bars on standard error, or nothing."""

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


def progress_bar(label: str, enabled: bool) -> Progress:
    """Return a function that draws a bar; the bar disappears after the last piece."""
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
