"""The benchmark of a known prompt after a kill, with the smallest model."""

import json
from pathlib import Path

import pytest

from lab.__main__ import main
from tests.project.source import ROOT


@pytest.mark.slow
def test_pages_are_found_after_a_kill(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    demo = str(ROOT / "checkpoints" / "demo")
    status = main(["kv_restart", "--model", demo, "--tokens", "600", "--repeat", "1"])
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    # of so small a model reading may take longer than computing, and is then left out
    assert status in (0, 1) and shown["is_same"]
    assert shown["read_first_s"] > 0 and shown["saved_first_s"] > 0


def test_small_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv_restart", "--tokens", "10"]) == 2
    assert "tokens must be at least 256" in capsys.readouterr().err
