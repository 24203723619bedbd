"""The settings of a part, and the writer of its measurements."""

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
"""Writes one measurement, given as keywords."""


@dataclass(frozen=True)
class Setting:
    """Settings of all parts of a run."""

    kind: Kind
    dry_run: bool
    attention: str | None = None  # implementation for whole steps; None: the device's own
    model: str | None = None  # model to serve; None: the first of `serving.MODELS` that fits


class Skip(Exception):
    """A measurement is impossible on this machine, without an error; the message gives the reason."""


def open_rows(path: Path) -> Write:
    """Open a file of measurements, one line of JSON each. Every line is flushed, so it stays if the part is killed."""
    file = path.open("w", encoding="utf-8")

    def write(**row: Any) -> None:
        finite = {key: _finite(value) for key, value in row.items() if value is not None}
        file.write(json.dumps(finite, allow_nan=False) + "\n")
        file.flush()

    return write


def _finite(value: Any) -> Any:
    """NaN and infinities as text: JSON has no such numbers."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def attempt(write: Write, measure: Callable[[], Found], **about: Any) -> None:
    """Write the result of `measure`, or the reason of its failure."""
    try:
        found = measure()
    except Skip as reason:
        found = {"skipped": str(reason)}
    except Exception as problem:
        found = {"error": f"{type(problem).__name__}: {' '.join(str(problem).split())[-400:]}"}
    write(**about, **found)


def attempt_all(write: Write, checks: list[tuple[Found, Callable[[], Callable[[], Found]]]]) -> None:
    """Prepare checks in parallel, since compiling takes long, and run them one after the other.

    Args:
        write: called with the results, in the order of `checks`.
        checks: keywords that describe each check, and a function to prepare it; that one returns a function to run it.
    """
    with ThreadPoolExecutor() as pool:
        prepared = [pool.submit(prepare) for _, prepare in checks]
        for (about, _), future in zip(checks, prepared, strict=True):
            attempt(write, lambda future=future: future.result()(), **about)  # type: ignore[misc]


def gib(size: float) -> str:
    """A number of bytes as text in GiB."""
    return f"{size / 2**30:.1f} GiB"
