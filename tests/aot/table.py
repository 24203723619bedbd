"""The tables in `docs/measured`: each page is a text, and then one table to the end, written by a program.

A run that measures some of the rows keeps the other rows of its table.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.pages.markdown import wide_table
from tests.project.source import ROOT

MEASURED = ROOT / "docs" / "measured"


def merge_table(text: str, header: list[str], keys: int, rows: list[list[str]]) -> str:
    """Update rows of a page's table; its rows are then sorted.

    Args:
        text: the page.
        header: names of the columns.
        keys: number of leading columns that identify a row.
        rows: new rows; other rows are kept.
    """
    found = {tuple(row[:keys]): row for row in [*read_rows(text), *rows]}
    return replace_table(text, header, [found[key] for key in sorted(found)])


def replace_table(text: str, header: list[str], rows: list[list[str]]) -> str:
    """Replace the table of a page; the rows keep the given order."""
    return _split(text)[0] + wide_table(header, rows)


def write_table(page: Path, header: list[str], keys: int, rows: list[list[str]]) -> None:
    """Update rows of the table in a file."""
    page.write_text(
        merge_table(page.read_text(encoding="utf-8"), header, keys, rows), encoding="utf-8"
    )


def read_rows(text: str) -> list[list[str]]:
    """The rows of a page's table, without the header."""
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in _split(text)[1][2:]
    ]


def _split(text: str) -> tuple[str, list[str]]:
    """The text before the table, and the lines of the table."""
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith("| ")), len(lines))
    return "".join(lines[:first]), lines[first:]


def slow_but(quick: Collection[Any], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Mark cases as slow, except the quick ones: only these are run by continuous integration."""
    return [
        case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases
    ]


def recorded_rows(
    request: pytest.FixtureRequest, name: str, header: list[str]
) -> Iterator[list[list[str]]]:
    """Collect rows for a fixture. With `-m aot`, they are written to `docs/measured/aot-{name}.md` at the end."""
    found: list[list[str]] = []
    yield found
    if request.config.getoption("markexpr") == "aot":
        write_table(MEASURED / f"aot-{name}.md", header, 3, found)
