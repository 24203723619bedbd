"""docs/flags.md: its numbers are those of the pages that it links to."""

import re

import pytest

from tests.docs.pages import tokens
from tests.project.source import ROOT

SOURCES = ("docs/benchmarks.md", "docs/quantisation.md")  # of its second and third table


def cells_of_tables(page: str) -> list[list[str]]:
    """The cells of each table, without the heads."""
    tables: list[list[str]] = []
    for before, token in zip(tokens(page), tokens(page)[1:], strict=False):
        if token.type == "tbody_open":
            tables.append([])
        if before.type == "td_open":
            tables[-1].append(token.content)
    return tables


@pytest.mark.parametrize(("table", "source"), [(1, SOURCES[0]), (2, SOURCES[1])])
def test_numbers_are_in_their_sources(table: int, source: str) -> None:
    text = (ROOT / source).read_text(encoding="utf-8")
    numbers = [cell for cell in cells_of_tables("docs/flags.md")[table] if re.fullmatch(r"[\d.,]+", cell)]
    assert len(numbers) > 7
    for number in numbers:
        assert re.search(rf"\| {re.escape(number)} \|", text), f"{number} is not in {source}"
