"""Errors between the points of measured kernels, and the paper's figures from kernels: on toy tables."""

import json
import math
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.gpus import left_out, what_if
from lab.paper.kernels import KernelSource, cost_with, kernel_cost
from lab.reproduce import beside, predicted, table1
from lab.reproduce.rows import Row
from orca_jax.sim.cost import work_of
from orca_jax.tools.plan.timing import kernel_times
from tests.project.source import ROOT
from tests.simulate.test_tables import HEADS, written


def test_a_left_out_line_lies_between_its_neighbours() -> None:
    """A straight line has no error by the linear rule, and a square none by powers."""
    line = {("", 1, m): float(m) for m in (1, 2, 4, 8)}
    assert list(left_out.column_errors(line, 2, is_power=False)) == [0, 0]
    square = {("", 1, m): float(m * m) for m in (1, 2, 4)}
    assert list(left_out.column_errors(square, 2, is_power=True)) == [pytest.approx(0)]
    assert list(left_out.column_errors(square, 2, is_power=False)) == [pytest.approx(0.5)]


def test_left_out_heads(tmp_path: Path) -> None:
    path = tmp_path / "a100_sxm_generation_attention_vllm.csv"
    lines = [f"{heads},4,1,{t},{heads * t}" for heads in (8, 16, 32) for t in (2, 4)]
    path.write_text("\n".join([HEADS, *lines]) + "\n", encoding="utf-8")
    assert list(left_out.heads_errors(path, "generation_attention")) == [pytest.approx(0)] * 2


def test_the_command_of_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu_tables", "--data", str(tmp_path)]) == 2
    assert "has no tables of kernels" in capsys.readouterr().err
    path = tmp_path / "a100_sxm_gemm_vllm.csv"
    points = [f"1,1,{m},{us}\n" for m, us in ((4, 4), (8, 20), (16, 16))]
    path.write_text("".join(["n,k,m,us\n", *points]), encoding="utf-8")
    table = left_out.left_out(path)
    found = {each.column: list(each.errors) for each in table}
    assert found == {"n": [], "k": [], "m": [pytest.approx(0.6)]}


def test_full_batches_of_fast_transformer(tmp_path: Path) -> None:
    """Two members in four places take as long as four."""
    written(tmp_path)
    cost = kernel_cost("13B", KernelSource(tmp_path), is_batched=True)
    two = work_of([(9, 1, True)] * 2, 2)._replace(members=2)
    four = work_of([(9, 1, True)] * 4, 4)._replace(members=4)
    assert cost.filled(two, 4, 1) == cost.stages(four, 1)


def test_the_engine_of_the_paper(tmp_path: Path) -> None:
    """A prompt's tokens have the attention of increments, and each request a kernel in each layer."""
    written(tmp_path)
    source = KernelSource(tmp_path)
    cost = cost_with("preset:gpt3-13b", 2, source)
    prompts = work_of([(0, 32, False), (9, 1, True)], 2)._replace(members=2)
    tokens = work_of([(9, 1, True)], 2)._replace(increments=33, context=32 * 33 / 2 + 10)
    (inner,) = cost.inner.stages(tokens, 1)
    assert cost.stages(prompts, 1) == [pytest.approx(inner + 40 * 2 * cost.inner.least)]
    fused = cost_with("preset:gpt3-13b", 2, source._replace(attention="fused", writes=0))
    assert fused.stages(prompts, 1) == fused.inner.stages(prompts, 1)
    one = prompts._replace(members=1)
    assert cost.stages(one, 2) is cost.stages(one, 2)  # known from the first time


def test_rows_stand_beside_the_fitted_ones() -> None:
    row = Row("fig9.9c.gain", "gain", 1.25, 1.47).as_json()
    fitted = json.loads((beside.RESULTS / "fig9-full.json").read_text(encoding="utf-8"))
    value = f"{fitted['rows']['fig9.9c.gain']['ours']:.4g}"
    assert f"| fig9.9c.gain | gain | 1.25 | {value} | 1.47 |" in beside.rows_table([row])


def test_table_1_from_kernels(tmp_path: Path) -> None:
    """Splits whose heads no table has are timed by peak rates; the paper's split of 13B is the only one."""
    written(tmp_path)
    times = kernel_times(f"tables:{tmp_path},source=vllm,bandwidth=1.555e12", "a100-80")
    found, rows = table1.reproduced(times)
    assert found["13B"]["ours"] == "1 x 1"
    assert [row.name for row in rows] == [f"table1.{name}" for name in found]


def test_the_paper_predicted_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "all", "--cost", "tables"]) == 2
    assert "cost tables needs data" in capsys.readouterr().err
    assert main(["reproduce", "fig9", "--cost", "tables", "--data", "x"]) == 2
    assert "give all instead of a name" in capsys.readouterr().err
    assert main(["reproduce", "all", "--cost", "tables", "--data", "missing"]) == 2
    assert "missing/a100_sxm_gemm_vllm.csv cannot be read" in capsys.readouterr().err


def test_the_recorded_predictions_are_on_the_page() -> None:
    text = (ROOT / predicted.PAGE).read_text(encoding="utf-8")
    assert predicted.block() in text
    assert what_if.block() in text


def test_what_if(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Iterations serve more than batches by request, and the causes' factors multiply to the whole."""
    written(tmp_path)
    load = what_if.Load("toy", "preset:gpt3-13b", 2, 1, [(32, 2 + 9 * (n % 2)) for n in range(40)])
    source = KernelSource(tmp_path)
    steps = what_if.STEPS[:5]
    results = [what_if.result(step, load, source)._asdict() for step in steps]
    rates = [each["requests_per_s"] for each in results]
    assert rates[1] > rates[0] and rates[4] > rates[3]
    assert [each["pause_s"] > 0 for each in results] == [False, True, True, True, True]
    results += [{**results[-1], "requests_per_s": factor * rates[-1]} for factor in (2, 3)]
    ((name, *factors, whole),) = what_if.causes({"toy": results})
    assert name == "toy" and float(factors[-1]) == 3
    assert float(whole) == pytest.approx(math.prod(map(float, factors)), rel=0.02)
    assert main(["what_if", "--data", str(tmp_path), "--traces", str(tmp_path)]) == 2
    assert "AzureLLMInferenceTrace_conv.csv" in capsys.readouterr().err
