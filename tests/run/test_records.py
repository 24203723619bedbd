"""The table of records: a row for each file with tests that take longer than a few minutes, and what a run changes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.project.source import ROOT
from tests.run.records import LIMIT, MOST_COMMITS, Record, git, records, run, write

ROWS = records()


def files_of_records() -> set[str]:
    """The files with marked tests or a limit above `LIMIT`, but those for devices and compilers that may be absent."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        limits = re.findall(r"mark\.timeout\((\d+)\)", text)
        is_long = any(int(limit) > LIMIT for limit in limits) or re.search(r"mark\.record\b", text)
        if is_long and path.parent.name != "aot":
            found.add(path.relative_to(ROOT).as_posix())
    return found


def test_each_long_test_has_a_row() -> None:
    assert {row.path for row in ROWS} == files_of_records()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.path)
def test_what_a_row_covers_exists(row: Record) -> None:
    assert row.covers and all((ROOT / path).exists() for path in row.covers)


def test_a_table_is_written_as_it_is_read(tmp_path: Path) -> None:
    table = tmp_path / "records.toml"
    table.write_text("# About\n\n[old]\n", encoding="utf-8")
    rows = [
        Record("a.py", ("b", "c")),
        Record("d.py", ("e",), "2026-01-02 03:04", "1234567890", 3.5),
        Record("f.py", ("e",), "2026-01-02 03:04", "1234567890", 0.1, 'needs "podman"'),
    ]
    write(rows, table)
    assert records(table) == rows
    assert table.read_text(encoding="utf-8").startswith("# About\n\n[")


def test_an_age_counts_commits_of_what_is_covered() -> None:
    assert Record("a.py", ("orca_jax",)).age() is None
    assert "no record" in Record("a.py", ("orca_jax",)).line()
    if (ROOT / ".git").exists():
        assert Record("a.py", ("orca_jax",), commit="HEAD").age() == 0 < MOST_COMMITS


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone")
def test_the_age_of_a_replaced_commit_is_told_by_the_date() -> None:
    """The commit is in no history, as after a rebase."""
    replaced = Record("a.py", ("orca_jax", "tests"), "2020-01-01 00:00", "f" * 10)
    count = git("rev-list", "--count", "HEAD", "--", *replaced.covers)
    assert replaced.age() == int(count or 0) > 0
    assert replace(replaced, date="2100-01-01 00:00").age() == 0


@pytest.mark.parametrize(
    ("inside", "status", "commit", "skipped"),
    [
        ("<testcase/>", 0, "1234567890", ""),
        ("<testcase/>", 1, "", ""),
        ("", 0, "", ""),
        ('<testcase><skipped message="no podman"/></testcase>', 0, "1234567890", "no podman"),
        (
            '<testcase><skipped message="no podman"/></testcase><testcase/>',
            0,
            "1234567890",
            "",
        ),
    ],
    ids=["passed", "failed", "no test", "skipped", "skipped in part"],
)
def test_what_a_run_records(
    inside: str,
    status: int,
    commit: str,
    skipped: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A program in place of `scripts/test` writes a report."""
    program = tmp_path / "scripts" / "test"
    program.parent.mkdir()
    monkeypatch.setattr("tests.run.records.ROOT", tmp_path)
    report = f"<testsuite>{inside}</testsuite>"
    program.write_text(
        f"#!/bin/sh\necho '{report}' > \"${{6#*=}}\"; exit {status}\n", encoding="utf-8"
    )
    program.chmod(0o755)
    found = run(Record("a.py", ("orca_jax",)), "1234567890")
    assert (found.commit, found.skipped) == (commit, skipped)
    assert found.is_wrong() == (not commit), "there is no clone, so the age is unknown"
