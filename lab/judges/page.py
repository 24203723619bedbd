"""The table of third-party clients in docs/conformance.md, between two marks. Rows of other clients stay."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.pages.markdown import between, table

BEGIN, END = "<!-- judges: begin -->", "<!-- judges: end -->"
HEAD = (
    "client",
    "versions",
    "checks passed",
    "OpenAI's shapes",
    "all passed",
    "date, commit",
)
Row = tuple[str, str, str, str, str]

__all__ = ["Row", "update"]


def update(page: Path, rows: Mapping[str, Row], order: Sequence[str]) -> None:
    """Write rows into the page. Rows of removed clients are deleted.

    Args:
        page: a file with both marks.
        rows: new rows by name of the client.
        order: the names of all clients.

    Raises:
        SystemExit: the page lacks a mark.
    """
    text = page.read_text(encoding="utf-8")
    old = text.partition(BEGIN)[2].partition(END)[0]
    lines = {
        match[1]: match[2] for match in re.finditer(r"^\| (\S+) \| (.*) \|$", old, re.MULTILINE)
    }
    lines |= {name: " | ".join(row) for name, row in rows.items()}
    kept = table(HEAD, [(name, lines[name]) for name in order if name in lines])
    try:
        fresh = between(text, BEGIN, END, f"\n{kept}")
    except ValueError as error:
        raise SystemExit(f"error: {page.name}: {error}") from None
    page.write_text(fresh, encoding="utf-8")
