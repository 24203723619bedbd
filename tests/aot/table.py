"""The table that a run writes into a page of the documentation: rows that it did not compile stay as they were."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.project.source import ROOT

BEGIN, END = "<!-- {name}: written by the tests -->", "<!-- {name}: end -->"


def merge_table(text: str, name: str, header: list[str], keys: int, rows: list[list[str]]) -> str:
    """`text` with the table between the marks of `name` brought up to date.

    Args:
        text: the page; it has both marks.
        name: of the table.
        header: names of the columns.
        keys: so many of the first columns name a row.
        rows: what was found now; the others are kept.
    """
    _, old, _ = _around(text, name)
    found = {tuple(cells[:keys]): cells for cells in map(_cells, old.strip().splitlines()[2:])}
    found |= {tuple(row[:keys]): row for row in rows}
    return replace_table(text, name, header, [found[key] for key in sorted(found)])


def replace_table(text: str, name: str, header: list[str], rows: list[list[str]]) -> str:
    """`text` with another table between the marks of `name`, its rows in the order given."""
    before, _, after = _around(text, name)
    lines = [_line(header), _line(["---"] * len(header)), *map(_line, rows)]
    return f"{before}{BEGIN.format(name=name)}\n" + "\n".join(lines) + f"\n{END.format(name=name)}{after}"


def _around(text: str, name: str) -> tuple[str, str, str]:
    """What stands before the marks of `name`, between them, and after."""
    before, rest = text.split(BEGIN.format(name=name))
    between, after = rest.split(END.format(name=name))
    return before, between, after


def write_table(page: Path, name: str, header: list[str], keys: int, rows: list[list[str]]) -> None:
    """The same to a file."""
    page.write_text(merge_table(page.read_text(encoding="utf-8"), name, header, keys, rows), encoding="utf-8")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def slow_but(quick: Collection[Any], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The cases; all but the quick ones are left out of the default tests."""
    return [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def recorded_rows(request: pytest.FixtureRequest, name: str, header: list[str]) -> Iterator[list[list[str]]]:
    """What this run found, for a fixture; a run of these tests alone writes it to the page at its end."""
    found: list[list[str]] = []
    yield found
    if request.config.getoption("markexpr") == "aot":
        write_table(ROOT / "docs" / "kernels.md", name, header, 3, found)
