"""The settings of a part, and the writer of its measurements."""

import json
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

UTILIZATION = 0.9  # of the device's memory, as the engine's default

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
    work: Path = Path()  # folder of the run
    case: str | None = None  # the only case to check; None: all


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


FATAL = (
    "ILLEGAL_ADDRESS",
    "MISALIGNED",
    "illegal memory access",
    "misaligned address",
    "LAUNCH_FAILED",
    "ILLEGAL_INST",
)
"""Parts of the messages of errors after which CUDA fails in this process for good."""


def is_fatal(row: Found) -> bool:
    """True if the device cannot be used any more by this process."""
    return any(text in str(row.get("error")) for text in FATAL)


def attempt(write: Write, measure: Callable[[], Found], **about: Any) -> Found:
    """Write the result of `measure`, or the reason of its failure. Returns the row."""
    try:
        found = measure()
    except Skip as reason:
        found = {"skipped": str(reason)}
    except Exception as problem:
        found = {"error": f"{type(problem).__name__}: {' '.join(str(problem).split())[-400:]}"}
    write(**about, **found)
    return {**about, **found}


def attempt_all(
    write: Write, checks: list[tuple[Found, Callable[[], Callable[[], Found]]]]
) -> None:
    """Prepare checks in parallel, since compiling takes long, and run them one after the other.

    Args:
        write: called with the results, in the order of `checks`.
        checks: keywords that describe each check, and a function to prepare it; that one returns a function to run it.
    """
    with ThreadPoolExecutor() as pool:
        prepared = [pool.submit(prepare) for _, prepare in checks]
        for (about, _), future in zip(checks, prepared, strict=True):
            # the last line of the log, if the device hangs
            print("running", *about.values(), flush=True)
            row = attempt(write, lambda future=future: future.result()(), **about)  # type: ignore[misc]
            if is_fatal(row):
                write(
                    skipped="the other cases: after such an error every call of this process fails"
                )
                os._exit(0)  # without waiting for the compilations, or for the device


def gib(size: float) -> str:
    """A number of bytes as text in GiB."""
    return f"{size / 2**30:.1f} GiB"
