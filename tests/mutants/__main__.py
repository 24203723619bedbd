"""Random small changes of the package's code, which the default tests should find.

    python -m tests.mutants [--count N] [--seed N] [--seconds N]

Each mutant is made in a copy of the project, and the tests that import its module run there until one fails. The rows
of the printed table are the survivors: tests saw the change and passed, or did not end within the time.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from random import Random

from tests.mutants.choice import near_tests
from tests.mutants.mutations import Mutant, mutants
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
SECONDS = 240.0
KILLED, SURVIVED, UNFINISHED = "killed", "survived", "unfinished"


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

    def outcome(self, mutant: Mutant, seconds: float) -> str:
        """Run the tests of a mutant, and take it back."""
        tests = near_tests(mutant.file)
        self._write(mutant.file.path, mutant.text())
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "--timeout=60", *tests],
                cwd=self.root,
                env={**os.environ, "PYTHONPATH": str(self.root)},
                capture_output=True,
                check=False,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return UNFINISHED
        finally:
            self._write(mutant.file.path, mutant.file.text)
        return KILLED if done.returncode else SURVIVED

    def _write(self, path: Path, text: str) -> None:
        """Write a file with a time of its own: Python finds stored code by whole seconds."""
        self._version += 1
        target = self.root / path
        target.write_text(text, encoding="utf-8")
        os.utime(target, (self._version, self._version))


def outcomes(count: int, seed: int, seconds: float) -> Iterator[tuple[Mutant, str]]:
    """The first mutants of a seed, each with its outcome."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for number, mutant in enumerate(drawn(seed)[:count]):
            print(f"{number} of {count}: {mutant.place}", file=sys.stderr, flush=True)
            yield mutant, copy.outcome(mutant, seconds)


def row(mutant: Mutant, outcome: str) -> str:
    """A row of the table, on one line."""
    old = " ".join(mutant.old.split())
    return f"| {mutant.place} | {mutant.kind} | `{old}` | `{mutant.new}` | {outcome} |"


def main() -> None:
    """Print the survivors as they are found, and the numbers of all outcomes."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="mutants to run")
    parser.add_argument("--seed", type=int, default=SEED, help="of their choice")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="limit for each")
    args = parser.parse_args()
    print("| place | change | code | mutant | outcome |\n|---|---|---|---|---|")
    ends = Counter[str]()
    for mutant, outcome in outcomes(args.count, args.seed, args.seconds):
        ends[outcome] += 1
        if outcome != KILLED:
            print(row(mutant, outcome), flush=True)
    print(", ".join(f"{number} {outcome}" for outcome, number in ends.most_common()))


if __name__ == "__main__":
    main()
