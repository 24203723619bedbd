"""The throughput of a pipeline over its iterations in flight: verdicts and table by hand, and a small run."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab import workers
from lab.__main__ import main
from lab.real.opening import surroundings
from orca_jax.values.config import EngineConfig

CPU = {"cpu": "a CPU", "cpu_flags": ["fma"], "devices": "2 x cpu"}


def found(gain: float, cores: int = 2, *, is_equal: bool = True) -> dict[str, Any]:
    rates, gains = {"1": 50.0, "2": 50 * gain}, {"1": 1.0, "2": gain}
    run = {"load_average": 1.5, "steal": 0.0, "attempts": 1}
    each = {"tokens_per_s": rates, "gain": gains, "equal_tokens": is_equal, "runs": [run]}
    about: dict[str, Any] = {"tokens": [64, 32], "num_requests": 48, "passes": 3, "verdict": "PASS"}
    about |= {"pipelines": {"2": each, "4": each}, "hardware": CPU | {"cores": cores}}
    return surroundings(EngineConfig("preset:toy")) | about


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (found(1.2), "PASS"),
        (found(1.19), "FAIL"),
        (found(1.5, is_equal=False), "FAIL"),
        (found(1.5, cores=1), "-"),
    ],
)
def test_verdict(result: dict[str, Any], expected: str) -> None:
    assert workers.verdict(result) == expected


def test_four_stages_on_two_cores_are_shown_as_oversubscribed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "RESULT", tmp_path / "workers.json")
    workers.RESULT.write_text(json.dumps(found(1.25)))
    lines = workers.block().splitlines()
    assert "| 2 on 2 cores | 2 | 62.5 | 1.25 | equal |" in lines
    assert "| 4 on 2 cores, oversubscribed | 2 | 62.5 | 1.25 | equal |" in lines
    assert (
        "load average at most 1.5 after a run, steal at most 0.0%; 0 of 2 runs repeated"
        in lines[-1]
    )


def test_a_small_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stages of the toy take no time, so only tokens and the number of runs are compared."""
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.5, 0.5))
    monkeypatch.setattr(workers, "RESULT", tmp_path / "workers.json")
    flags = [
        "--model",
        "preset:toy",
        "--num-requests",
        "5",
        "--tokens",
        "6",
        "4",
        "--passes",
        "2",
        "--max-bs",
        "2",
    ]
    main(["workers", *flags, "--stages", "2", "--record"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads(workers.RESULT.read_text())
    pipeline = result["pipelines"]["2"]
    assert pipeline["tokens_per_s"].keys() == {"1", "2", "3"} and len(pipeline["runs"]) == 6
    assert pipeline["equal_tokens"]
