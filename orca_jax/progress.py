"""Progress bars on standard error, or nothing."""

from collections.abc import Callable

from tqdm import tqdm

type Progress = Callable[[int, int], None]
"""Called after each piece of work with the number of pieces done, and of all pieces."""


def progress_bar(label: str, enabled: bool) -> Progress:
    """Return a function that draws a bar; the bar disappears after the last piece."""
    bar: tqdm[None] | None = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:
            bar = tqdm(total=total, desc=label, disable=not enabled, leave=False)
        bar.update(done - bar.n)
        if done == total:
            bar.close()
            bar = None

    return show
