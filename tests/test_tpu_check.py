"""`scripts/tpu_check` must not be tried for the first time on a TPU VM."""

import json
import subprocess
import sys

import pytest

from tests.source import ROOT

SCRIPT = ROOT / "scripts" / "tpu_check.py"


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=False)


def test_without_a_tpu_it_says_what_to_do() -> None:
    done = run()
    assert done.returncode == 2
    assert "there is no TPU here; --dry-run shows" in done.stderr


@pytest.mark.slow
def test_dry_run() -> None:
    done = run("--dry-run")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["differences"]
    assert report["wrong"] == []
    assert all(row["seconds"] > 0 for row in report["roofline"])
    assert report["serving"]["compiles_while_serving"] == 0


@pytest.mark.slow
def test_a_serving_run_that_fails_is_reported() -> None:
    done = run("--dry-run", "--model", "nonsense")
    assert done.returncode == 1
    assert "nonsense" in done.stderr
    assert "error" in json.loads(done.stdout.splitlines()[-1])["serving"]
