"""Latencies by hand on a virtual clock, and the same loop with the toy model in real time."""

import dataclasses
import json
from pathlib import Path

import pytest

from lab.length_prediction import _capacity, _contestants, _tau
from lab.logged_answers import (
    LoggedAnswers,
    PassRunner,
    Served,
    latency_figures,
    poisson,
    read_answers,
)
from orca_jax.assembly.engine import build_engine
from orca_jax.sched.pool import ClientBound
from orca_jax.sched.predict import Oracle, RunningQuantiles
from orca_jax.sim.cost import LinearCost
from orca_jax.sim.toy import TOY_MODEL
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.cache_spec import one_group
from orca_jax.values.config import CacheConfig, EngineConfig, ExecutorConfig
from orca_jax.values.errors import ConfigError
from scripts.length_ranker.word_problems import prompts_of, read_questions

SECOND = LinearCost(per_iteration=1.0, per_token=0.0, per_pair=0.0)
THREE = LoggedAnswers([[5, 6], [7], [8, 9]], [3, 1, 2], max_tokens=9)


def make_runner() -> PassRunner:
    config = EngineConfig(model="preset:toy", scheduler="chunked", overlap=False, max_num_seqs=1)
    cache = CacheConfig(one_group(TOY_MODEL.layer_caches), (64,), 4, "float32")
    resolved = ExecutorConfig("float32", 1, (16,), 1, 64, cache)
    return PassRunner(dataclasses.replace(build_engine(config), executor_config=resolved), config)


@pytest.mark.parametrize(
    ("order", "latencies"),
    [("fcfs", [3, 4, 6]), ("bound", [3, 4, 6]), ("quantiles", [3, 4, 6]), ("oracle", [6, 1, 3])],
)
def test_one_row_by_hand(order: str, latencies: list[float]) -> None:
    """All arrive at once, with a token per second. The oracle runs short ones first; quantiles have not seen any."""
    contestant = _contestants(len)[order]
    served = make_runner().simulated(
        THREE, [0.0] * 3, contestant.policy, contestant.predictor(THREE), SECOND
    )
    assert served.latencies == latencies and served.lengths == [3, 1, 2] and served.wall == 6
    assert latency_figures([served])["mean_latency_s"] == pytest.approx(sum(latencies) / 3)


def test_a_late_request_waits_from_its_arrival() -> None:
    runner = make_runner()
    served = runner.simulated(THREE, [0.0, 10.0, 10.5], "fcfs", ClientBound(), SECOND)
    assert served.latencies == [3, 1, 2.5]
    assert _capacity(runner, THREE, SECOND) == 3 / 6


def test_the_engine_itself() -> None:
    """The toy model never stops early, so each answer has `max_tokens`. The timeline has all iterations."""
    served, timeline = make_runner().real(
        THREE, [0.0, 0.0, 0.01], "shortest", Oracle(THREE.by_name())
    )
    assert served.lengths == [end.generated for _, end in sorted(timeline.ends.items())]
    assert all(latency > 0 for latency in served.latencies) and len(timeline.iterations) >= max(
        served.lengths
    )


def test_figures_over_passes() -> None:
    shown = latency_figures([Served([1, 3], [1, 1], 4), Served([4, 6], [1, 1], 7)])
    assert shown == {"mean_latency_s": 3.5, "spread_s": 1.5, "p99_latency_s": 6, "max_latency_s": 6}


def test_tau_learns_from_those_before() -> None:
    """Short prompts have short answers; the predictor ignores the first sixteen of each class."""
    prompts, lengths = zip(
        *(([1] * size, size) for _ in range(60) for size in (2, 4, 8)), strict=True
    )
    answers = LoggedAnswers(prompts, lengths, max_tokens=9)
    assert _tau(Oracle(answers.by_name()), answers) == 1
    assert _tau(ClientBound(), answers) == 0
    assert 0.5 < _tau(RunningQuantiles(), answers) < 1


def test_arrivals_are_poisson() -> None:
    arrivals = poisson(4000, 5.0, seed=1)
    assert arrivals[0] == 0 and arrivals == sorted(arrivals)
    assert arrivals[-1] / 3999 == pytest.approx(1 / 5, rel=0.05)
    assert poisson(4, 5.0, seed=1) == poisson(4, 5.0, seed=1) != poisson(4, 5.0, seed=2)


def test_questions_and_logs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(
        json.dumps({"question": " Who’s “there”? ", "answer": "2"}) + "\n\n", encoding="utf-8"
    )
    assert read_questions(str(path)) == ['Who\'s "there"?']
    (prompt,) = prompts_of(["Why?"], ByteTokenizer())
    assert bytes(prompt) == b"<|user|>Why?<|assistant|>"
    with pytest.raises(ConfigError, match="log_lengths"):
        read_answers(str(path), 10)
    path.write_text("\n".join(json.dumps({"prompt_ids": [n], "generated": n}) for n in range(1, 9)))
    assert read_answers(str(path), 8).lengths == list(range(1, 9))
    drawn = read_answers(str(path), 8).draw(30, seed=0)
    assert len(drawn.lengths) == 30 and all(
        prompt == [length] for prompt, length in zip(drawn.prompts, drawn.lengths, strict=True)
    )
    for wrong, message in ((7, "none longer"), (0, "none longer")):
        with pytest.raises(ConfigError, match=message):
            read_answers(str(path), wrong)
    for read in (lambda name: read_answers(name, 8), read_questions):
        with pytest.raises(ConfigError, match="cannot be read"):
            read(str(tmp_path / "nowhere"))
