"""The common code of the clients' programs: flags, named checks, and the report for the runner.

The programs run in environments of their own: this module needs only the standard library.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Check = Callable[[Any], None]

__all__ = ["Settings", "catch", "expect", "parser", "run", "settings"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The server and the file of the report. `url` has no path."""

    url: str
    model: str
    api_key: str
    report: Path


def settings(description: str | None) -> Settings:
    """Read the flags of every program."""
    args = parser(description).parse_args()
    return Settings(args.url, args.model, args.api_key, args.report)


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the flags of every program."""
    made = argparse.ArgumentParser(description=description)
    for name, text in (
        ("--url", "URL of the server, without a path"),
        ("--model", "name of the model"),
        ("--api-key", "API key of the server"),
    ):
        made.add_argument(name, required=True, help=text)
    made.add_argument("--report", type=Path, required=True, help="file for the results, as JSON")
    return made


def expect(holds: object, what: str) -> None:
    """Fail the check unless `holds`: an `assert` with a message, also in optimised mode."""
    if not holds:
        raise AssertionError(what)


def catch[E: Exception](kind: type[E], call: Callable[..., Any], **fields: Any) -> E:
    """Call, and return the expected exception."""
    try:
        call(**fields)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} for {fields}")


def run(
    checks: Sequence[Check], subject: Any, packages: Sequence[str] | Mapping[str, str], report: Path
) -> int:
    """Run every check, also after a failure, and write the report.

    Args:
        checks: functions of the subject; their names are the checks' names.
        subject: argument of every check, usually a client.
        packages: packages of Python to report the versions of, or the versions by name.
        report: file that gets `{"versions": ..., "checks": [{"name", "seconds", "error"}]}`.

    Returns:
        1 if a check failed, else 0.
    """
    rows: list[dict[str, Any]] = []
    for check in checks:
        start = time.monotonic()
        error = None
        try:
            check(subject)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:2000]
            traceback.print_exc()
        rows.append(
            {"name": check.__name__, "seconds": round(time.monotonic() - start, 2), "error": error}
        )
        print(
            f"{'ok' if error is None else 'FAILED':7}{check.__name__}", file=sys.stderr, flush=True
        )
    is_known = isinstance(packages, Mapping)
    versions = (
        packages if is_known else {name: importlib.metadata.version(name) for name in packages}
    )
    report.write_text(
        json.dumps({"versions": versions, "checks": rows}, indent=1), encoding="utf-8"
    )
    return int(any(row["error"] is not None for row in rows))
