"""The table of third-party clients in docs/conformance.md, between two marks. Rows of other clients stay."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

BEGIN, END = "<!-- judges: begin -->", "<!-- judges: end -->"
HEAD = (
    "| client | versions | checks passed | OpenAI's shapes | all passed | date, commit |\n"
    + "|---" * 6
    + "|\n"
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
    before, found, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    old, end, after = rest.partition(END)
    if not (found and end):
        raise SystemExit(f"error: {page.name} has no {BEGIN} and {END}")
    lines = {match[1]: match[0] for match in re.finditer(r"^\| (\S+) \|.*\|$", old, re.MULTILINE)}
    lines |= {name: f"| {name} | {' | '.join(row)} |" for name, row in rows.items()}
    table = HEAD + "".join(f"{lines[name]}\n" for name in order if name in lines)
    page.write_text(f"{before}{BEGIN}\n{table}{END}{after}", encoding="utf-8")
