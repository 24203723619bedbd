"""Rows of a reproduction: our value beside the paper's, the error, and a verdict."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["PASS", "FAIL", "INPUT", "SHOWN"]
EXPECTED = Path(__file__).with_name("expected.json")
"""The verdicts of each form of the command, by the name of the row."""


@dataclass(frozen=True)
class Row:
    """A comparison.

    Attributes:
        name: of the row, in dotted parts.
        claim: a claim of `ARTIFACT.md`, such as C1; empty: a part of a figure.
        text: a description of the value, with its unit.
        ours: our value.
        paper: the paper's value or sentence.
        error: the error of our value: a share, unless `text` says otherwise; None for a sentence that holds or not.
        limit: the tolerance of the error, stated before the run.
        is_input: True if an assumption decides the value.
        holds: whether a sentence of the paper holds; None: there is nothing to judge without a limit.
    """

    name: str
    text: str
    ours: Any
    paper: Any
    error: float | None = None
    limit: float | None = None
    claim: str = ""
    is_input: bool = False
    holds: bool | None = None

    @property
    def verdict(self) -> Verdict:
        """INPUT, whether the error is within the tolerance or the sentence holds, or SHOWN: there is no limit."""
        if self.is_input:
            return "INPUT"
        holds = self.holds
        if self.error is not None and self.limit is not None:
            holds = self.error <= self.limit
        if holds is None:
            return "SHOWN"
        return "PASS" if holds else "FAIL"

    def as_json(self) -> dict[str, Any]:
        """The row with its verdict."""
        return asdict(self) | {"verdict": self.verdict}


def print_rows(rows: Sequence[Row]) -> None:
    """Print a line for each row, at once."""
    for row in rows:
        error = "" if row.error is None else f"error {row.error:6.1%}"
        limit = "" if row.limit is None else f"at most {row.limit:.0%}"
        print(
            f"  {row.verdict:<5} {row.claim:<2} {row.text:<78} {shown(row.ours):>16} {shown(row.paper):>16}"
            f"  {error:<13} {limit}",
            flush=True,
        )


def shown(value: Any) -> str:
    """A value with four digits, as it is printed."""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def changed(rows: Sequence[Row], form: str, expected: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Lines about the rows whose verdicts differ from the expected ones of this form, `quick` or `full`."""
    known = expected.get(form, {})
    return [
        f"{row.name}: {row.verdict}, expected {known.get(row.name, 'nothing')}"
        for row in rows
        if known.get(row.name) != row.verdict
    ]


def read_expected() -> dict[str, dict[str, str]]:
    """The file of expected verdicts."""
    found: dict[str, dict[str, str]] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return found
