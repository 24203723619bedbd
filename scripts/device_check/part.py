"""What a part is told, and how it writes down what it finds."""

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["gpu", "tpu"]
Found = dict[str, Any]
Write = Callable[..., None]
"""Called with one measurement, as keywords."""


@dataclass(frozen=True)
class Setting:
    """The same for all parts of a run."""

    kind: Kind
    dry_run: bool
    attention: str | None = None  # implementation for whole steps; None: the device's own
    model: str | None = None  # what is served; None: the largest of `serving.MODELS` that fits


class Skip(Exception):
    """This cannot be done here, which is nobody's mistake; the message says why."""


def open_rows(path: Path) -> Write:
    """A function that adds a measurement to a file, a line of JSON each; what was written stays if the part dies."""
    file = path.open("w", encoding="utf-8")

    def write(**row: Any) -> None:
        finite = {key: _finite(value) for key, value in row.items() if value is not None}
        file.write(json.dumps(finite, allow_nan=False) + "\n")
        file.flush()

    return write


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def attempt(write: Write, measure: Callable[[], Found], **about: Any) -> None:
    """Write what was measured, or why it could not be."""
    try:
        found = measure()
    except Skip as reason:
        found = {"skipped": str(reason)}
    except Exception as problem:
        found = {"error": f"{type(problem).__name__}: {' '.join(str(problem).split())[-400:]}"}
    write(**about, **found)


def attempt_all(write: Write, checks: list[tuple[Found, Callable[[], Callable[[], Found]]]]) -> None:
    """Checks that are prepared side by side, since compiling takes long, and run one after the other.

    Args:
        write: takes the results, in the order of `checks`.
        checks: what each is about, and what prepares it: that returns what runs it.
    """
    with ThreadPoolExecutor() as pool:
        prepared = [pool.submit(prepare) for _, prepare in checks]
        for (about, _), future in zip(checks, prepared, strict=True):
            attempt(write, lambda future=future: future.result()(), **about)  # type: ignore[misc]


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.1f} GiB"
