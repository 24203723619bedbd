"""The table "Files to touch" of CONTRIBUTING.md as data."""

import re
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tests.project.source import ROOT

PAGE = ROOT / "CONTRIBUTING.md"
OPTIONAL = ("for ", "if ")
"""The first words of a part that only some changes need; parts are between semicolons."""


class Row(NamedTuple):
    """What is added, the code that it needs, and its tests and pages."""

    what: str
    code: str
    others: str

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The files that every such change edits, relative to the root; of several in a group, at least one."""
        return [
            *[tuple([f"orca_jax/{path}" for path in group]) for group in _groups(self.code)],
            *_groups(self.others),
        ]

    @property
    def commands(self) -> list[str]:
        """The commands that write generated pages again."""
        return [span for span in spans(self.others) if span.startswith("python ")]

    @property
    def names(self) -> list[str]:
        """The names of Python that the row mentions."""
        return [span for span in spans(f"{self.code} {self.others}") if span.isidentifier()]

    @property
    def headings(self) -> list[tuple[str, str]]:
        """Headings of pages, each with its page."""
        return re.findall(r'"([^"]+)" in `([^`]+)`', self.others)

    @property
    def paths(self) -> set[str]:
        """All files and folders that the row mentions, relative to the root."""
        code = {f"orca_jax/{path}" for path in paths(self.code)}
        return code | set(paths(self.others))


@cache
def rows() -> dict[str, Row]:
    """The rows of the table by what is added."""
    part = PAGE.read_text(encoding="utf-8").partition("## Files to touch")[2].partition("\n## ")[0]
    lines = [line.strip("| ") for line in part.splitlines() if line.startswith("| a")]
    found = [Row(*[cell.strip() for cell in line.split(" | ")]) for line in lines]
    return {row.what: row for row in found}


def spans(cell: str) -> list[str]:
    """The pieces of code of a cell."""
    return re.findall(r"`([^`]+)`", cell)


def paths(cell: str) -> Iterator[str]:
    """The files and folders among the pieces of code."""
    for span in spans(cell):
        if re.fullmatch(r"[\w./-]+(\.\w+|/)", span):
            yield span


def _groups(cell: str) -> list[tuple[str, ...]]:
    parts = [part.strip() for part in cell.split(";")]
    needed = [part for part in parts if not part.startswith(OPTIONAL)]
    groups = [tuple(paths(piece)) for part in needed for piece in part.split(",")]
    return [group for group in groups if group]
