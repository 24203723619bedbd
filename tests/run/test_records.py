"""The table of records: a row for each file with tests that take longer than a few minutes, and what a run changes."""

import re
from pathlib import Path

import pytest

from tests.project.source import ROOT
from tests.run.records import LIMIT, MOST_COMMITS, Record, records, write

ROWS = records()


def files_with_long_limits() -> set[str]:
    """The files of tests with a limit above `LIMIT`, but those for devices and compilers that may be absent."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        limits = re.findall(r"mark\.timeout\((\d+)\)", path.read_text(encoding="utf-8"))
        if any(int(limit) > LIMIT for limit in limits) and path.parent.name != "aot":
            found.add(path.relative_to(ROOT).as_posix())
    return found


def test_each_long_test_has_a_row() -> None:
    assert {row.path for row in ROWS} == files_with_long_limits()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_what_a_row_covers_exists(row: Record) -> None:
    assert row.covers and all((ROOT / path).exists() for path in row.covers)


def test_a_table_is_written_as_it_is_read(tmp_path: Path) -> None:
    table = tmp_path / "records.toml"
    table.write_text("# About\n\n[old]\n", encoding="utf-8")
    rows = [Record("a.py", ("b", "c")), Record("d.py", ("e",), "2026-01-02", "1234567890", 3.5)]
    write(rows, table)
    assert records(table) == rows
    assert table.read_text(encoding="utf-8").startswith("# About\n\n[")


def test_an_age_counts_commits_of_what_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Record("a.py", ("orca_jax",)).age() is None
    assert Record("a.py", ("orca_jax",), commit="f" * 10).age() is None, "the commit is gone"
    if (ROOT / ".git").exists():
        assert Record("a.py", ("orca_jax",), commit="HEAD").age() == 0 < MOST_COMMITS
    assert "no record" in Record("a.py", ("orca_jax",)).line()
