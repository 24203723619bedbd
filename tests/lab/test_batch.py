"""The batch benchmarks on the toy engine: both ways run the same tokens, and every row is counted."""

import json
from pathlib import Path

import pytest

from lab.__main__ import main


def test_batch_against_offline(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "batch",
                "--model",
                "preset:toy",
                "--num-requests",
                "6",
                "--rounds",
                "2",
                "--no-progress",
            ]
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(result["batch_wall_s"]) == len(result["offline_wall_s"]) == 2
    assert (result["last_batch"]["rows"], result["last_batch"]["errors"]) == (6, {})
    assert result["batch_to_offline"] > 0
    assert main(["batch", "--rounds", "0"]) == 2


def test_batch_of_a_recorded_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "azure.csv"
    data.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "2023-11-16 18:17:03,40,8\n" * 3,
        encoding="utf-8",
    )
    flags = [
        "--trace",
        "azure",
        "--trace-data",
        str(data),
        "--length-scale",
        "0.5",
        "--num-requests",
        "3",
    ]
    assert main(["batch", "--model", "preset:toy", "--rounds", "1", "--no-progress", *flags]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["last_batch"]["prompt_tokens"], result["last_batch"]["completion_tokens"]) == (
        3 * 20,
        3 * 4,
    )
    assert (result["trace_data"], result["length_scale"]) == (str(data), 0.5)


@pytest.mark.slow
def test_memory_does_not_grow_with_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch_memory", "--rows", "3000", "30000", "--order", "finished"]) == 0
    short, long = json.loads(capsys.readouterr().out.splitlines()[-1])["runs"]
    assert long["peak_mib"] - short["peak_mib"] < 20
