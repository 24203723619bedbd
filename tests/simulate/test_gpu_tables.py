"""Errors between the points of measured kernels, and the paper's figures from kernels: on toy tables."""

from pathlib import Path

import pytest

from lab.__main__ import main
from lab.gpus import left_out
from lab.paper.kernels import KernelSource, kernel_cost
from lab.reproduce import predicted
from orca_jax.sim.cost import work_of
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


def test_the_paper_predicted_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "all", "--cost", "tables"]) == 2
    assert "cost tables needs data" in capsys.readouterr().err
    assert main(["reproduce", "fig9", "--cost", "tables", "--data", "x"]) == 2
    assert "give all instead of a name" in capsys.readouterr().err
    assert main(["reproduce", "all", "--cost", "tables", "--data", "missing"]) == 2
    assert "missing/a100_sxm_gemm_vllm.csv cannot be read" in capsys.readouterr().err


def test_the_recorded_predictions_are_on_the_page() -> None:
    assert predicted.block() in (ROOT / predicted.PAGE).read_text(encoding="utf-8")
