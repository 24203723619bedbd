"""Tests of the level *thought* run without JAX, and the others are left out."""

import subprocess
import sys

from tests.project.source import ROOT

PASSING, SKIPPED, DESELECTED = (
    "tests/access/test_call_limit.py",
    "tests/exec/test_copies.py",
    "tests/batch/test_run.py",
)


def test_a_module_with_jax_is_skipped_and_one_that_starts_programs_deselected() -> None:
    words = ["-m", "pytest", "-q", "-n", "0", "--thought", PASSING, SKIPPED, DESELECTED]
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert summary.startswith("4 passed, 1 skipped") and "deselected" in summary
    assert "imports JAX" in done.stdout
