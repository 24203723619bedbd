"""`scripts/gpu_check` must not be tried for the first time where a GPU is rented by the minute."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.source import ROOT


def dry_run(folder: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu" / "gpu_main.py"), "--dry-run", "--out", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((folder / "result.json").read_text())
    return report


def test_a_part_that_fails_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    parts = dry_run(tmp_path, "--parts", "step:gpt2-xl,machine,speed:gather", "--attention", "nonsense")["parts"]
    assert "nonsense" in parts["step:gpt2-xl"]["error"]
    assert parts["machine"]["ok"]
    assert all(row["us"] > 0 for row in parts["speed:gather"]["rows"])
    assert "share_of_copy" in parts["speed:gather"]["rows"][0]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_every_part(tmp_path: Path) -> None:
    parts = dry_run(tmp_path)["parts"]
    assert {name: part["error"] for name, part in parts.items()} == dict.fromkeys(parts)
    assert all(part["rows"] for part in parts.values())
