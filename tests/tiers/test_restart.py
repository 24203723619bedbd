"""The benchmarks of pages outside of the KV cache, at small sizes."""

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


def test_rates_of_tiers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--page-kib", "8", "--pages", "4", "--repeat", "1", "--folder", str(tmp_path)]
    assert main(["kv_tiers", *sizes]) == 0
    (shown,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rounds"]
    assert {"memcpy", "memory_read", "files_written", "dd_read"} <= shown.keys()
    assert min(shown.values()) > 0
    assert main(["kv_tiers", "--pages", "0"]) == 2
    assert "pages" in capsys.readouterr().err
