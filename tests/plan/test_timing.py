"""Times of plans from measured kernels, and from peak rates where there are none."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.sim.cost import work_of
from orca_jax.tools.plan.__main__ import main
from orca_jax.tools.plan.tables import read_tables
from tests.simulate.test_tables import written

PLAN = ["--model", "preset:gpt3-13b", "--context", "100", "--max-num-seqs", "4", "--json"]


def planned(
    capsys: pytest.CaptureFixture[str], devices: str, cost: str
) -> dict[int, dict[str, Any]]:
    assert main([*PLAN, "--devices", devices, "--cost", cost]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    return {
        each["tensor_parallel_size"]: each["times"]
        for each in report["options"]
        if each["pipeline_parallel_size"] == 1
    }


def test_a_plan_has_the_times_of_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two devices have 20 heads, as the table; one device has 40, by a batch of twice the size."""
    text = written(tmp_path)
    times = planned(capsys, "a100-80x4", f"tables:{tmp_path},source=vllm")
    work = work_of([(99, 1, True)] * 4, 4)._replace(members=4)
    (seconds,) = read_tables(text).stages(work, 1)
    assert times[2]["from"] == "measured kernels"
    assert times[2]["token_seconds"] == pytest.approx(seconds)
    assert times[1]["from"] == "measured kernels"
    assert times[4]["from"] == "peak rates"  # 10 heads are fewer than the table has


def test_devices_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "b200", f"tables:{tmp_path},source=vllm")[1]["from"] == "peak rates"


def test_wrong_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cost, message in (
        ("0.02", "cost must be tables:DIR,source=S"),
        (f"tables:{tmp_path},source=vllm", "h100_sxm_gemm_vllm.csv cannot be read"),
        (f"tables:{tmp_path}", "cost must be tables:DIR"),
    ):
        assert main([*PLAN, "--devices", "h100", "--cost", cost]) == 2
        assert message in capsys.readouterr().err
