"""Starts of a server: medians by hand, wrong flags, and the whole benchmark with the toy."""

import json
import sys
from pathlib import Path

import pytest

from orca_jax.tools.bench.__main__ import main
from orca_jax.tools.bench.start import ServerStart, medians, size_of
from orca_jax.values.startup import START_PHASES


def test_medians_are_of_each_figure() -> None:
    starts = [
        ServerStart(n, 9 - n, 0.5, 16, 12, {"import": n, "load": 2 * n}, n) for n in (1.0, 5.0, 2.0)
    ]
    assert medians(starts) == {
        "ready_s": 2, "first_token_s": 7, "load_average": 0.5, "programs": 16, "from_cache": 12, "reported_s": 2,
        "processor_s": 0, "resident_gb": 0, "peak_gb": 0, "served_gb": 0, "phases": {"import": 2, "load": 4},
    }  # fmt: skip


def test_start_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-num-seqs", "4", "--no-log-requests"]
    assert main(["start", "--timeout", "60", "--requests", "2", "preset:toy", "--", *flags]) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed.splitlines()[-1])
    for kind in ("cold", "warm"):
        assert f"preset:toy, {kind} start" in printed
        figures = result[kind]
        assert list(figures["phases"]) == list(START_PHASES)
        assert 0 < figures["phases"]["import"] <= figures["reported_s"] <= figures["ready_s"]
        assert figures["ready_s"] < figures["first_token_s"]
        if sys.platform == "linux":  # two processes of Python at least
            assert figures["processor_s"] > 0.2
            assert (
                0.02
                < figures["resident_gb"]
                <= figures["peak_gb"]
                < 2
                > figures["served_gb"]
                > 0.02
            )
        assert [start["phases"] for start in result["starts"][kind]] == [figures["phases"]]
    assert result["cache_bytes"] == 0 and result["config"]["server_flags"] == flags
    assert isinstance(result["hardware"]["cpu_flags"], list)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--repeat", "0"], "repeat must be at least 1"),
        (["--requests", "-1"], "requests must be at least 0"),
        (["--", "--port=3"], "--port is set by this benchmark"),
        (["preset:toy", "--model", "preset:toy"], "model cannot be combined with the word MODEL"),
        (
            ["--model", "preset:toy", "--", "--max-num-seqs", "0"],
            "exit code 2; its log ends with: error: --max",
        ),
    ],
)
def test_wrong_flags_are_errors(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["start", *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_size_of_a_cache_includes_folders(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "one").write_bytes(b"123")
    (tmp_path / "below" / "two").write_bytes(b"45")
    assert size_of(tmp_path) == 5
