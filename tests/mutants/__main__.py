"""Random small changes of the package's code, which the default tests should find.

    python -m tests.mutants.seen
    python -m tests.mutants [--count N] [--seed N] [--seconds N] [--jobs N] [--only PATH]

The first command runs the tests once, and keeps which of them run each line. Then each mutant is made in a copy of the
project, and the tests that run its line run there until one fails. Outcomes are kept as they come, so that a command
that was ended continues. The rows of the table are the survivors: no test runs the line, those that do passed, or
they did not end within the time.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from random import Random
from threading import Lock

import pytest

from tests.mutants.choice import chosen
from tests.mutants.mutations import Mutant, mutants
from tests.mutants.seen import STORED, Seen
from tests.project.rows.test_rows import COPIED
from tests.project.source import ROOT, python_files

FOLDERS = (
    "orca_jax/sched",
    "orca_jax/exec",
    "orca_jax/model",
    "orca_jax/serve/openai",
    "orca_jax/link",
)
COUNT, SEED = 300, 300
SECONDS = 60.0
GRACE = 60.0
"""Seconds for the start of a run, and for a machine that others use too."""
KILLED, SURVIVED, UNFINISHED, NOT_RUN = "killed", "survived", "unfinished", "not run"
NO_SUCH_TEST = pytest.ExitCode.USAGE_ERROR


def drawn(seed: int) -> list[Mutant]:
    """All mutants of the folders, in a random order that depends on the seed and the code alone."""
    found = list(_mutants())
    Random(seed).shuffle(found)
    return found


@cache
def _mutants() -> tuple[Mutant, ...]:
    return tuple(chain.from_iterable(map(mutants, python_files(*FOLDERS))))


class Copy:
    """A copy of the project in which mutants are made."""

    def __init__(self, root: Path) -> None:
        """Copy what tests need."""
        self.root = root
        self._version = 0
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, root / name, ignore=ignored)
        for file in [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *ROOT.glob("*.txt")]:
            shutil.copy(file, root)

    def outcome(self, mutant: Mutant, tests: Sequence[str], seconds: float) -> str:
        """Run tests with a mutant, and take it back."""
        self._write(mutant.file.path, mutant.text())
        try:
            status = self._status(tests, seconds)
            if status == NO_SUCH_TEST:  # cases may be named by what was changed
                functions = dict.fromkeys(test.partition("[")[0] for test in tests)
                status = self._status([*functions], seconds)
        except subprocess.TimeoutExpired:
            return UNFINISHED
        finally:
            self._write(mutant.file.path, mutant.file.text)
        return KILLED if status else SURVIVED

    def _status(self, tests: Sequence[str], seconds: float) -> int:
        """Run tests in a group of processes, of which none is left."""
        names = self.root / "names.txt"  # some are too long for a command
        names.write_text("\n".join(tests), encoding="utf-8")
        options = f"-q -x -n 0 --timeout=60 -o cache_dir={ROOT}/.pytest_cache @{names}"
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options.split()],
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _write(self, path: Path, text: str) -> None:
        """Write a file with a time of its own: Python finds stored code by whole seconds."""
        self._version += 1
        target = self.root / path
        target.write_text(text, encoding="utf-8")
        os.utime(target, (self._version, self._version))


class Outcomes:
    """The outcomes of a seed, in a file that has them as they come."""

    def __init__(self, path: Path) -> None:
        """Read those of earlier commands."""
        self._path = path
        self._known: dict[str, str] = {}
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            self._known = dict(json.loads(line) for line in lines)

    def get(self, mutant: Mutant) -> str | None:
        """The outcome of a mutant; None if it did not run."""
        return self._known.get(_key(mutant))

    def put(self, mutant: Mutant, outcome: str) -> None:
        """Keep an outcome."""
        self._known[_key(mutant)] = outcome
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps([_key(mutant), outcome]) + "\n")


def _key(mutant: Mutant) -> str:
    return row(mutant, str(mutant.node.col_offset))


def run(mutants: Sequence[Mutant], outcomes: Outcomes, seconds: float, jobs: int) -> None:
    """Run the mutants that have no outcome yet, several at once."""
    seen = Seen()
    left = iter([mutant for mutant in mutants if outcomes.get(mutant) is None])
    turn = Lock()

    def work(folder: str) -> None:
        copy = Copy(Path(folder))
        while True:
            with turn:
                mutant = next(left, None)
                if mutant is None:
                    return
                tests = chosen(mutant, seen, seconds)
            if not tests:  # not kept: later runs may see more
                continue
            begin = time.monotonic()
            outcome = copy.outcome(mutant, tests, seconds + GRACE)
            with turn:
                outcomes.put(mutant, outcome)
            spent = time.monotonic() - begin
            print(f"{mutant.place}: {outcome}, {len(tests)} tests, {spent:.0f} s", file=sys.stderr)

    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(jobs)]
        with ThreadPoolExecutor(jobs) as pool:
            try:
                list(pool.map(work, folders))
            finally:  # an interrupted command begins no further one
                with turn:
                    deque(left, maxlen=0)


def row(mutant: Mutant, outcome: str) -> str:
    """A row of the table, on one line."""
    old = " ".join(mutant.old.split())
    return f"| {mutant.place} | {mutant.kind} | `{old}` | `{mutant.new}` | {outcome} |"


def main() -> None:
    """Run what has no outcome yet, and print the survivors and the numbers of all outcomes."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="mutants to run")
    parser.add_argument("--seed", type=int, default=SEED, help="of their choice")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="tests of each, in all")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at once")
    parser.add_argument("--only", default="", metavar="PATH", help="mutants of a folder or file")
    args = parser.parse_args()
    found = drawn(args.seed)[: args.count]
    mutants = [mutant for mutant in found if mutant.place.startswith(args.only)]
    outcomes = Outcomes(STORED / f"outcomes-{args.seed}.jsonl")
    run(mutants, outcomes, args.seconds, args.jobs)
    print("| place | change | code | mutant | outcome |\n|---|---|---|---|---|")
    ends = Counter[str]()
    for mutant in mutants:
        outcome = outcomes.get(mutant) or NOT_RUN
        ends[outcome] += 1
        if outcome != KILLED:
            print(row(mutant, outcome))
    print(", ".join(f"{number} {outcome}" for outcome, number in ends.most_common()))


if __name__ == "__main__":
    main()
