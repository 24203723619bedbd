"""`scripts/gpu_check` and `scripts/tpu_check` must not be run for the first time where a chip costs by the minute."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.source import ROOT

KINDS = ["gpu", "tpu"]


def run(kind: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts" / f"{kind}_check"), *flags]
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def dry_run(kind: str, folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and what became of each part."""
    done = run(kind, "--dry-run", "--out", str(folder), *flags)
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((folder / "result.json").read_text())
    for name, part in report["parts"].items():
        lines = (folder / f"{name.replace(':', '-')}.jsonl").read_text().splitlines()
        assert len(lines) == len(part["rows"])
    return done.returncode, report["parts"]


def test_a_part_that_fails_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    status, parts = dry_run("gpu", tmp_path, "--parts", "serve:orca,machine,speed:gather", "--model", "nonsense")
    assert status == 1
    assert "nonsense is no directory" in parts["serve:orca"]["error"]
    assert parts["machine"]["ok"]
    assert all(row["us"] > 0 for row in parts["speed:gather"]["rows"])
    assert "share_of_copy" in parts["speed:gather"]["rows"][0]


def test_what_cannot_be_done_is_skipped_with_a_reason(tmp_path: Path) -> None:
    status, parts = dry_run("tpu", tmp_path, "--parts", "machine,peer:continuous")
    assert status == 0
    assert parts["machine"]["rows"][0]["devices"] == 2
    assert "no TPU" in parts["peer:continuous"]["rows"][0]["skipped"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_device_it_says_what_to_do(kind: str, tmp_path: Path) -> None:
    done = run(kind, "--out", str(tmp_path))
    assert done.returncode == 2
    assert f"there is no {kind.upper()} here" in done.stderr
    assert "--dry-run shows what would be done" in done.stderr


def test_an_unknown_part_is_named() -> None:
    done = run("tpu", "--parts", "machine,correct:gpu")
    assert done.returncode == 2
    assert "there is no part 'correct:gpu'; there are machine, correct:tpu" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", KINDS)
def test_every_part(kind: str, tmp_path: Path) -> None:
    status, parts = dry_run(kind, tmp_path)
    assert {name: part["error"] for name, part in parts.items()} == dict.fromkeys(parts)
    assert status == 0
    assert all(part["rows"] for part in parts.values())


@pytest.mark.slow
def test_model_and_attention_may_be_others(tmp_path: Path) -> None:
    flags = "--parts", "serve:orca", "--model", "demo", "--attention"
    status, parts = dry_run("tpu", tmp_path, *flags, "xla")
    assert (status, parts["serve:orca"]["rows"][0]["model"]) == (0, "demo")
    status, parts = dry_run("tpu", tmp_path, *flags, "nonsense")
    assert status == 1
    assert "no attention implementation 'nonsense'" in parts["serve:orca"]["error"]
