"""Generated pages: tables of Markdown, text between two marks, and pages that are written again or compared."""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Page(NamedTuple):
    """A page, or a page of which parts are generated.

    Attributes:
        path: the file.
        renew: takes the text of the page, and returns it with its generated parts made again.
        command: writes the page.
    """

    path: Path
    renew: Callable[[str], str]
    command: str

    def is_old(self) -> bool:
        """Return True if the file has another text than the one that would be written."""
        text = self.path.read_text(encoding="utf-8")
        return self.renew(text) != text

    def write(self) -> None:
        """Write the page again."""
        text = self.path.read_text(encoding="utf-8")
        self.path.write_text(self.renew(text), encoding="utf-8")


def between(text: str, begin: str, end: str, content: str) -> str:
    """Return the text of a page with other content between two marks. Raises ValueError if a mark is missing."""
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"the page has no {begin} and {end}; write both around the generated part")
    return f"{before}{begin}{content}{end}{after}"


def write_between(path: Path, begin: str, end: str, content: str) -> None:
    """Write other content between two marks of a page. Raises ValueError if a mark is missing."""
    page = path.read_text(encoding="utf-8")
    path.write_text(between(page, begin, end, f"\n{content}\n"), encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, rule: str = "---") -> str:
    """Return a table, each line with its end. `rule` is the text below each title."""
    return "".join([line(head), f"|{'|'.join([rule] * len(head))}|\n", *map(line, rows)])


def wide_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with blanks in its rule, as in the pages of measured results."""
    return table(head, rows, rule=" --- ")


def line(cells: Iterable[str]) -> str:
    """Return a row of a table, with its end."""
    return f"| {' | '.join(cells)} |\n"


def escaped(text: str) -> str:
    """Return the text of a cell: in one line, and without a bar that would end the cell."""
    return re.sub(r"\s+", " ", text).replace("|", r"\|")
