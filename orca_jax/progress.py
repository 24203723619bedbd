"""Progress bars on standard error, or nothing."""

from collections.abc import Callable, Iterable
from typing import Any

from tqdm import tqdm

type Progress = Callable[[Iterable[Any]], Iterable[Any]]


def progress_bar(label: str, enabled: bool) -> Progress:
    """A function that wraps an iterable so that a bar follows it; the bar vanishes when it is done."""

    def wrap(items: Iterable[Any]) -> Iterable[Any]:
        bar: Iterable[Any] = tqdm(items, desc=label, disable=not enabled, leave=False)
        return bar

    return wrap
