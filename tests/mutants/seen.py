"""Which default tests run each line of the package, and the share of its branches that they take.

    python -m tests.mutants.seen [FOLDER ...]
    python -m tests.mutants.seen --report

It runs the tests of the folders, or all, under `coverage`, which is no dependency: pip install coverage. What it found
stays in `runs/mutants`, and the same folders replace it. Lines of a process belong to the test that started it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.project.source import PACKAGE, ROOT

STORED = ROOT / "runs" / "mutants"
SECONDS = "seconds.json"
COUNTED = ("num_statements", "covered_lines", "num_branches", "covered_branches")
OPTIONS = f"""[run]
branch = true
parallel = true
source = {PACKAGE}
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit
disable_warnings = module-not-imported, no-data-collected, couldnt-parse, include-ignored
"""
"""Coverage reads them in each process that starts, by the name in COVERAGE_PROCESS_START."""


class Seen:
    """Lines and tests of earlier runs, by folders of tests."""

    def __init__(self, stored: Path = STORED) -> None:
        """Read them; there are none in a new folder."""
        self._folders = sorted(path.parent for path in stored.glob(f"*/{SECONDS}"))
        self._files: dict[Path, dict[int, set[str]]] = {}

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The time of each test."""
        found: dict[str, float] = {}
        for folder in self._folders:
            found |= json.loads((folder / SECONDS).read_text(encoding="utf-8"))
        return found

    def tests(self, path: Path, lines: Iterable[int]) -> set[str]:
        """Tests that run one of the lines of a file."""
        if path not in self._files:
            self._files[path] = self._by_line(path)
        by_line = self._files[path]
        return {test for line in lines for test in by_line.get(line, ())} & set(self.seconds)

    def _by_line(self, path: Path) -> dict[int, set[str]]:
        found: dict[int, set[str]] = defaultdict(set)
        for data in self._data:
            for line, contexts in data.contexts_by_lineno(str(ROOT / path)).items():
                found[line] |= {context.rpartition(" (")[0] for context in contexts}
        return found

    @cached_property
    def _data(self) -> list[Any]:
        from coverage import CoverageData

        found = [CoverageData(str(folder / ".coverage")) for folder in self._folders]
        for data in found:
            data.read()
        return found


class Contexts:
    """A plugin of pytest under coverage, which names the test of each line and takes its time."""

    def __init__(self, folder: Path) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._folder = folder

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        from coverage import Coverage

        coverage = Coverage.current()
        assert coverage is not None
        coverage.switch_context(f"{item.nodeid} (call)")
        try:
            return (yield)
        finally:
            coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Keep what there is: workers end without a farewell."""
        from coverage import Coverage

        coverage = Coverage.current()
        assert coverage is not None
        coverage.save()
        if not hasattr(session.config, "workerinput"):
            text = json.dumps(self._seconds)
            (self._folder / SECONDS).write_text(text, encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Take part in a run of pytest and in its workers."""
    folder = Path(os.environ["COVERAGE_PROCESS_START"]).parent
    config.pluginmanager.register(Contexts(folder), "contexts")


def run(tests: Sequence[str], stored: Path = STORED) -> int:
    """Run tests, and keep what they have seen in a folder of its own."""
    folder = stored / sha256(" ".join(tests).encode()).hexdigest()[:16]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    options = folder / "options.ini"
    options.write_text(f"{OPTIONS}data_file = {folder / '.coverage'}\n", encoding="utf-8")
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(options)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"]
    done = subprocess.run([*command, "-p", __spec__.name, *tests], cwd=ROOT, env=environment)
    _coverage("combine", f"--rcfile={options}", "-q", str(folder))
    return done.returncode


def report(stored: Path = STORED) -> None:
    """Print the shares of statements and branches that tests run, of each folder of the package and of all."""
    with tempfile.TemporaryDirectory() as folder:
        data = f"--data-file={folder}/.coverage"
        _coverage("combine", data, "--keep", "-q", *map(str, stored.glob("*/.coverage")))
        _coverage("json", data, "-q", f"-o{folder}/report.json", f"--include={PACKAGE}/*")
        files = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))["files"]
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for path, file in files.items():
        for name in ("all", Path(path).relative_to("orca_jax").parts[0]):
            totals[name].update({each: file["summary"][each] for each in COUNTED})
    print("| folder | statements | branches |\n|---|---|---|")
    for name, total in sorted(totals.items()):
        lines = total["covered_lines"] / max(total["num_statements"], 1)
        branches = total["covered_branches"] / max(total["num_branches"], 1)
        print(f"| {name} | {lines:.1%} | {branches:.1%} |")


def _coverage(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT, check=True)


def main() -> int:
    """Run the tests, or print what earlier runs have seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.seen", description=__doc__)
    parser.add_argument("tests", nargs="*", metavar="FOLDER", help="folders of tests, or files")
    parser.add_argument("--report", action="store_true", help="print shares, and run nothing")
    args = parser.parse_args()
    if args.report:
        report()
        return 0
    return run(args.tests)


if __name__ == "__main__":
    sys.exit(main())
