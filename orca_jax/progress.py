"""Progress bars on standard error, or nothing."""

from collections.abc import Callable

from tqdm import tqdm

type Progress = Callable[[int, int], None]
"""Told how much is done of how much, after each piece."""


def progress_bar(label: str, enabled: bool) -> Progress:
    """A bar that appears with the first piece and vanishes with the last."""
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
