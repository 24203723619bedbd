"""Records: tests that take longer than a few minutes, with the date and the commit of their last run.

    .venv/bin/python -m tests.run.records             prints the table; fails if a record is missing or too old
    .venv/bin/python -m tests.run.records run [FILE]  runs the tests of a file, or of all, and writes their records

Its age counts commits of this history. If the commit is not among them, since it was rebased or joined with others,
those count that were written after the run began. Without a clone its age is unknown, which is no failure.

A file whose tests are all skipped, since the machine lacks a tool, has a record with the reason.

A slow test with a limit of its own above `LIMIT` seconds has the mark `record`, and so have cases that are many:
`-m "slow and not record"` leaves it out, and `-m record` selects it. records.toml has a row for each such file.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("records.toml")
LIMIT = 300
MOST_COMMITS = 30


def git(*words: str) -> str | None:
    """Output of a command of git in this clone; None if it fails."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


@dataclass(frozen=True)
class Record:
    """The last run of a file of tests that passed."""

    path: str
    covers: tuple[str, ...]  # folders and files of the package and the laboratory
    date: str = ""  # of its begin, with hours and minutes of UTC
    commit: str = ""  # of the code that was tested; empty: not run yet
    minutes: float = 0.0
    skipped: str = ""  # the reason for which no test ran

    def age(self) -> int | None:
        """Commits since the run that changed what is covered; None without a run, or without a clone."""
        if self.is_missing:
            return None
        if git("merge-base", "--is-ancestor", self.commit, "HEAD") is not None:
            count = git("rev-list", "--count", f"{self.commit}..HEAD", "--", *self.covers)
            return None if count is None else int(count)
        times = git("log", "--format=%at", "HEAD", "--", *self.covers)
        begun = datetime.fromisoformat(f"{self.date}+00:00").timestamp()
        return None if times is None else sum([int(time) > begun for time in times.split()])

    @property
    def is_missing(self) -> bool:
        """True before the first run."""
        return not self.commit

    def is_wrong(self) -> bool:
        """True if there was no run, or none for too many commits."""
        age = self.age()
        return self.is_missing or (age is not None and age > MOST_COMMITS)

    def line(self) -> str:
        """A row of the printed table."""
        words = [f"{self.path:55}"]
        if self.is_missing:
            return f"{words[0]} no record"
        age = self.age()
        words.append(f"{self.date} {self.commit} {self.minutes:5.1f} min")
        words.append("age unknown" if age is None else f"{age:3} commits ago")
        if self.skipped:
            words.append(f"skipped: {self.skipped}")
        return "  ".join(words)


def is_record(item: pytest.Item) -> bool:
    """True for a slow test with a limit above `LIMIT`, which is not for a device or an absent compiler.

    Marked cases are records, too.
    """
    if item.get_closest_marker("record") is not None:
        return True
    others = ("gpu", "tpu", "aot", "browser", "ray")
    if item.get_closest_marker("slow") is None or any(map(item.get_closest_marker, others)):
        return False
    limit = item.get_closest_marker("timeout")
    return limit is not None and limit.args[0] > LIMIT


def records(table: Path = TABLE) -> list[Record]:
    """The rows of the table."""
    rows = tomllib.loads(table.read_text(encoding="utf-8"))
    return [Record(path, tuple(row.pop("covers")), **row) for path, row in rows.items()]


def write(rows: Sequence[Record], table: Path = TABLE) -> None:
    """Write the table, with the comment at its top."""
    head = table.read_text(encoding="utf-8").partition("\n[")[0]
    parts = [head.rstrip()]
    for row in rows:
        folders = ", ".join(f'"{folder}"' for folder in row.covers)
        parts.append(f'\n["{row.path}"]\ncovers = [{folders}]')
        if row.commit:
            parts.append(f'date = "{row.date}"\ncommit = "{row.commit}"\nminutes = {row.minutes}')
        if row.skipped:
            parts.append(f"skipped = {json.dumps(row.skipped)}")
    table.write_text("\n".join(parts) + "\n", encoding="utf-8")


def run(row: Record, commit: str) -> Record:
    """Run the tests of a row; return its record: the earlier one if a test fails, or if none was found."""
    begun = datetime.now(UTC)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        words = ["-q", "-n", "0", "-m", "record", f"--junitxml={report}", row.path]
        done = subprocess.run([ROOT / "scripts" / "test", *words], cwd=ROOT, check=False)
        reasons = reasons_of_skips(report) if report.exists() else []
    if done.returncode != 0 or not reasons:
        print(f"{row.path} failed, or has no such test; its record stays")
        return row
    minutes = round((datetime.now(UTC) - begun).total_seconds() / 60, 1)
    skipped = reasons[0] if all(reasons) else ""
    return replace(
        row, date=f"{begun:%Y-%m-%d %H:%M}", commit=commit, minutes=minutes, skipped=skipped
    )


def reasons_of_skips(report: Path) -> list[str]:
    """The reason of each skipped test of a run, by its report, and an empty text for each that ran."""
    skips = [case.find("skipped") for case in ElementTree.parse(report).iter("testcase")]
    return ["" if skip is None else skip.get("message", "unknown") for skip in skips]


def _by_path() -> dict[str, Record]:
    return {row.path: row for row in records()}


def main(words: Sequence[str]) -> int:
    """Print the table, or run tests. Returns the exit status."""
    if words[:1] == ["run"]:
        commit = git("rev-parse", "--short=10", "HEAD")
        assert commit is not None, "records are made in a clone"
        for path in words[1:] or [row.path for row in records()]:
            found = run(_by_path()[path], commit)
            write(list({**_by_path(), path: found}.values()))  # others may have written meanwhile
    rows = _by_path()
    for row in rows.values():
        print(row.line())
    wrong = [row for row in rows.values() if row.is_wrong()]
    if wrong:
        print(f"{len(wrong)} records are missing or older than {MOST_COMMITS} commits; run them")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
