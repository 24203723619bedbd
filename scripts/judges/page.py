"""The judges' table in docs/conformance.md, between two marks; what was not judged again keeps its line."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

BEGIN, END = "<!-- judges: begin -->", "<!-- judges: end -->"
HEAD = (
    "| judge | versions | checks passed | held to the shapes | all green | date, commit |\n|---|---|---|---|---|---|\n"
)
Row = tuple[str, str, str, str, str]

__all__ = ["Row", "update"]


def update(page: Path, rows: Mapping[str, Row], order: Sequence[str]) -> None:
    """Write rows into the page; judges that are no more lose theirs.

    Args:
        page: with both marks.
        rows: new ones by judge.
        order: all judges.
    """
    before, found, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    old, end, after = rest.partition(END)
    if not (found and end):
        raise SystemExit(f"error: {page.name} has no {BEGIN} and {END}")
    lines = {match[1]: match[0] for match in re.finditer(r"^\| (\S+) \|.*\|$", old, re.MULTILINE)}
    lines |= {name: f"| {name} | {' | '.join(row)} |" for name, row in rows.items()}
    table = HEAD + "".join(f"{lines[name]}\n" for name in order if name in lines)
    page.write_text(f"{before}{BEGIN}\n{table}{END}{after}", encoding="utf-8")
