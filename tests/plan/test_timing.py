"""Times of plans from measured kernels, and from peak rates where there are none."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.sim.cost import work_of
from orca_jax.tools.plan.__main__ import main
from orca_jax.tools.plan.profile import read_profile
from orca_jax.tools.plan.tables import read_tables
from tests.simulate.test_profile import written as written_profile
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


def test_prompts_in_place_of_ended_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of 60 tokens and contexts of 100 are answers of 80 tokens: four rows have 3 tokens of prompts."""
    text = written(tmp_path)
    flag = f"tables:{tmp_path},source=vllm"
    assert main([*PLAN, "--devices", "a100-80x2", "--cost", flag, "--prompt", "60"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (found,) = [each for each in report["options"] if each["tensor_parallel_size"] == 2]
    work = work_of([(99, 1, True)] * 4 + [(0, 3, False)], 4)._replace(members=5)
    (seconds,) = read_tables(text).stages(work, 1)
    assert found["times"]["loaded_seconds"] == pytest.approx(seconds)
    assert planned(capsys, "a100-80x2", flag)[2]["loaded_seconds"] is None  # 512 tokens of a prompt


def test_a_profile_has_one_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The profile is that of one device, and of as many layers as the model."""
    prefix = written_profile(tmp_path).replace("layers=2", "layers=40")
    times = planned(capsys, "a100-80x2", prefix)
    assert {tensor: each["from"] for tensor, each in times.items()} == {
        1: "measured kernels",
        2: "peak rates",
    }
    work = work_of([(99, 1, True)] * 4, 4)._replace(members=4)
    assert times[1]["token_seconds"] == pytest.approx(sum(read_profile(prefix).stages(work, 1)))
    other = planned(capsys, "a100-80", prefix.replace("layers=40", "layers=41"))
    assert other[1]["from"] == "peak rates"


def test_devices_without_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "b200", f"tables:{tmp_path},source=vllm")[1]["from"] == "peak rates"


def test_wrong_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for cost, message in (
        ("0.02", "cost must be tables:DIR,source=S"),
        (f"tables:{tmp_path},source=vllm", "h100_sxm_gemm_vllm.csv cannot be read"),
        (f"tables:{tmp_path}", "cost must be tables:DIR"),
        (f"profile:{tmp_path}/toy", "layers, devices and replicas"),
    ):
        assert main([*PLAN, "--devices", "h100", "--cost", cost]) == 2
        assert message in capsys.readouterr().err
