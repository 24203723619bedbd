"""The benchmarks of quantisation: their figures and refusals."""

import json
import math

import numpy as np
import pytest

from lab.__main__ import main
from lab.quantisation.quantised import compare

ROWS = ["plain", "int8 weights", "fp8 weights", "int4 weights", "int8 KV cache", "fp8 KV cache"]


def test_figures_of_log_probabilities() -> None:
    plain, found = (
        [np.array([-1.0, -2.0]), np.array([-3.0])],
        [np.array([-1.0, -1.5]), np.array([-4.0])],
    )
    figures = compare(plain, found)
    assert math.isclose(figures["perplexity"], math.exp(6.5 / 3))
    assert (figures["mean_error"], figures["largest_error"]) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["quantised", "--rows", "0"], "rows must be at least 1"),
        (["quantised", "--passes", "-1"], "passes must be at least 0"),
        (["quantised", "--model", "preset:toy"], "one with weights"),
        (["products", "--inputs", "0"], "inputs must be at least 1"),
        (["products", "--outputs", "3", "--inputs", "3"], "two inputs in a byte"),
    ],
    ids=str,
)
def test_wrong_flags_are_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_when_used", "few_programs")
def test_all_rows_of_a_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "preset:gpt2-tiny", "--rows", "2", "--output-len", "2", "--passes", "1"]
    assert main(["quantised", *flags]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["storage"] for row in report][:6] == ROWS
    plain, *others = report
    assert plain["mean_error"] == 0 and all(0 < row["mean_error"] < 0.1 for row in others)
    assert report[3]["weight_bytes"] < report[1]["weight_bytes"] < plain["weight_bytes"] / 1.8
    assert report[4]["kv_bytes_per_token"] < plain["kv_bytes_per_token"] / 3


@pytest.mark.slow
def test_a_small_product(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["products", "--inputs", "4", "--outputs", "2", "--passes", "1"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["milliseconds"]["1"]) == {"float32", "bfloat16", "int8", "int4", "fp8"}
