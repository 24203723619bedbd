"""Calibration: its fit, its file, and its use by `LLM` and the server."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orca_jax import LLM, Question
from orca_jax.server_config import ServerConfig
from orca_jax.text.decisions.calibration import load_calibration
from orca_jax.text.decisions.reads import Fitted
from orca_jax.tools.calibrate.__main__ import main
from orca_jax.tools.calibrate.fit import (
    LabelledAnswers,
    cross_validated,
    fit,
    measure,
    probabilities,
)
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from tests.decisions.test_routes import decide, reads


def overconfident(number: int) -> LabelledAnswers:
    """Answers drawn from probabilities whose logits are twice too large, with a preference for the first label."""
    draw = np.random.default_rng(0)
    logits = draw.standard_normal((number, 3))
    true = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    answers = np.array([draw.choice(3, p=each) for each in true], np.int32)
    return LabelledAnswers((2 * logits + [1.0, 0.0, 0.0]).astype(np.float32), answers)


def test_a_fit_finds_the_temperature_and_the_prior() -> None:
    rows = overconfident(3000)
    fitted = fit(rows)
    assert fitted.temperature == pytest.approx(2, abs=0.3)
    assert fitted.bias[0] - fitted.bias[1] == pytest.approx(1, abs=0.4)
    before = measure(probabilities(rows.logprobs, Fitted()), rows.answers)
    after = measure(cross_validated(rows, 5, 0), rows.answers)
    assert after.ece < before.ece / 3
    assert after.nll < before.nll
    assert after.brier < before.brier
    assert after.accuracy >= before.accuracy - 0.01


def test_measures_by_hand() -> None:
    found = measure(np.array([[0.8, 0.2], [0.6, 0.4]]), [0, 1])
    assert found.accuracy == 0.5
    assert found.brier == pytest.approx((0.04 + 0.04 + 0.36 + 0.36) / 2)
    assert found.ece == pytest.approx((0.2 + 0.6) / 2)
    assert found.nll == pytest.approx(-(np.log(0.8) + np.log(0.4)) / 2)


def row(number: int) -> str:
    kinds: list[dict[str, Any]] = [
        {"type": "yes_no", "answer": number % 2 == 0},
        {"type": "choice", "options": ["a", "b"], "answer": "ab"[number % 2]},
        {"type": "score", "levels": ["low", "mid", "high"], "answer": number % 3},
    ]
    return json.dumps({"state": {"n": number}, "question": "?", **kinds[number % 3]}) + "\n"


def test_rows_become_a_file_that_calls_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(map(row, range(36))))
    target = tmp_path / "calibration.json"
    words = ["--model", "preset:toy", "-i", str(rows), "-o", str(target), "--max-model-len", "512"]
    assert main([*words, "--folds", "2"]) == 0
    assert "accuracy" in capsys.readouterr().out
    written = json.loads(target.read_text())
    assert set(written["kinds"]) == {"yes_no", "choice", "score"}
    assert written["kinds"]["score"]["after"]["nll"] > 0
    calibration = load_calibration(target)
    with LLM("preset:toy", max_model_len=512) as llm:
        question = Question.choice("?", ["a", "b"])
        (plain,) = llm.decide("s", [question])
        (own,) = llm.decide("s", [question], calibration=calibration)
    fitted = calibration["choice"]
    shifted = np.log(plain.probabilities) - np.array(fitted.bias[:2])
    wanted = np.exp(shifted / fitted.temperature)
    assert own.probabilities == pytest.approx(wanted / wanted.sum())


def test_the_server_says_that_it_uses_one(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text('{"version": 1, "kinds": {"choice": {"temperature": 0.5}}}')
    config = ServerConfig(EngineConfig(model="m"), calibration=str(path))
    choice = {"type": "choice", "instructions": "?", "choices": ["a", "b"]}
    predicate = {"type": "predicate", "instructions": "?"}
    answer, _, _ = decide(choice, predicate, script=reads(0.4, 0.1), config=config)
    own, other = answer.json()["answers"]
    assert own["x_calibrated"] is True
    assert own["probabilities"][0]["probability"] == pytest.approx(16 / 17)
    assert "x_calibrated" not in other


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2, "kinds": {}}',
        '{"version": 1, "kinds": {"rank": {"temperature": 1}}}',
        '{"version": 1, "kinds": {"choice": {}}}',
        '{"version": 1, "kinds": {"choice": {"temperature": 0}}}',
        '{"version": 1, "kinds": {"choice": {"temperature": 1, "bias": ["x"]}}}',
        '{"version": 1, "kinds": {"choice": {"temperature": 1, "bias": [NaN]}}}',
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"calibration\.json") as caught:
        load_calibration(path)
    assert caught.value.param == "calibration"


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "[]",
        '{"state": "s"}',
        '{"state": "s", "type": "rank", "question": "?", "answer": 1}',
        '{"state": "s", "type": "yes_no", "question": "?", "answer": "maybe"}',
        '{"state": "s", "type": "choice", "question": "?", "options": ["a"], "answer": "b"}',
        '{"state": "s", "type": "score", "question": "?", "levels": ["a"], "answer": 3}',
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, line: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f"\n{line}\n")
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2"):
        main(["preset:toy", "-i", str(rows), "-o", str(tmp_path / "out")])


def test_too_few_rows_are_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(row(0))
    with pytest.raises(ConfigError, match="10 rows"):
        main(["preset:toy", "-i", str(rows), "-o", str(tmp_path / "out"), "--max-model-len", "512"])
