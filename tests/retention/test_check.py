"""`check-policy` on retentions: sound ones pass, and each fault is found; a class reaches an engine by its setting."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from orca_jax import LLM, SamplingParams
from orca_jax.assembly.choices import choices_of
from orca_jax.cli.main import main
from orca_jax.policy import API, Keeping, KeptSpan
from orca_jax.sched.prefixes import spans
from orca_jax.tools.simulate.check import find_fault
from orca_jax.tools.simulate.run import LinearCost, SimulatedRequest, simulate
from orca_jax.values.cache_hints import CacheHints, CacheWish
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from tests.retention.mine import Mine
from tests.simulate import broken

STRANGER = Path(__file__).with_name("stranger.py")


class Sums(Mine):
    """Fails at the second use of pages."""

    def __init__(self) -> None:
        self.left = 2

    def used(self, span: KeptSpan, now: float) -> None:
        self.left -= 1
        if not self.left:
            raise ValueError("used twice")


class Text(Mine):
    """Returns no number."""

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        return Keeping("much")  # type: ignore[arg-type]


class Loops(Mine):
    """Never returns when pages are lost."""

    def lost(self, span: KeptSpan, now: float) -> None:
        while True:
            pass


class Old(Mine):
    """Written for another version."""

    api: ClassVar[int] = API - 1


class Bare:
    """Has no method."""

    api: ClassVar[int] = API


FAULTS = {
    Sums: "used raised ValueError: used twice at line",
    Text: "keep needs a number, and seconds above 0, got Keeping(worth='much'",
    Loops: "a method runs for more than 0.2 s",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_has_its_line(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_jax.tools.simulate.check.LOOP_SECONDS", 0.2)
    found = find_fault(kind, num_cases=24)
    assert found.startswith(FAULTS[kind]) and "; smallest case: " in found and "of talk" in found


@pytest.mark.parametrize("kind", [Mine, broken.Sound])
def test_a_sound_class_passes(kind: type) -> None:
    assert find_fault(kind, num_cases=24) == ""


def test_a_page_that_is_taken_twice_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(self: spans.SpanOrder) -> int:
        block = give_up(self)
        self._hits[block] = 0
        self._span_of.pop(next(iter(self._kept)), None)
        return block

    give_up = spans.SpanOrder.give_up
    monkeypatch.setattr(spans.SpanOrder, "give_up", taken)
    assert "is in no span" in find_fault(Mine, num_cases=96)


def test_a_strangers_class_passes_the_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(STRANGER.read_text().splitlines()) <= 60
    assert main(["check-policy", f"{STRANGER}:Frequent", "--cases", "24"]) == 0
    assert capsys.readouterr().out == "Frequent: no fault in 24 cases\n"


@pytest.mark.parametrize("name", ["lru-ttl", "cost", f"{STRANGER}:Frequent"])
def test_an_engine_with_hints_has_the_same_tokens(name: str) -> None:
    hints = CacheHints("s", wishes=(CacheWish(ttl=60.0),))
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, cache_hints=hints)
    prompts = [{"prompt_token_ids": [n % 5, *range(30)]} for n in range(12)]
    answers = []
    for settings in ({}, {"retention": name}):
        with LLM(
            model="preset:toy",
            max_num_seqs=2,
            num_pages=9,
            page_size=8,
            max_model_len=64,
            **settings,
        ) as llm:
            found = llm.generate(prompts, params)
        answers.append([list(output.outputs[0].token_ids) for output in found])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Old", "Old is written for version 0 of orca_jax.policy"),
        ("Bare", "retention: Bare lacks keep"),
        ("Nobody", "has no class Nobody"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        choices_of(EngineConfig(model="preset:toy", retention=f"{__name__}:{name}"))
    assert caught.value.param == "retention"


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"one of lru, lru-ttl, cost, or FILE\.py:CLASS, got 'lr"):
        EngineConfig(retention="lru_ttl")


def test_the_fields_that_it_reads_are_taken() -> None:
    config = EngineConfig(model="preset:toy", retention="tests.retention.mine:OfPrograms")
    assert "program" in choices_of(config).batches.reads
    assert "program" not in choices_of(EngineConfig(model="preset:toy")).batches.reads


@pytest.mark.parametrize("place", ["policy", "setting"])
def test_a_simulation_takes_a_retention(place: str) -> None:
    load = [SimulatedRequest(0.5 * n, [n % (9 if n % 3 else 2)] * 40, 4) for n in range(40)]
    cost = LinearCost(0.02, 0.0, 0.0)
    shape: dict[str, Any] = {"max_num_seqs": 2, "num_pages": 16}
    plain = simulate("chunked", load, cost, **shape)
    if place == "policy":
        run = simulate(Mine, load, cost, **shape)
    else:
        run = simulate("chunked", load, cost, retention="cost", **shape)
    cached = [sum([record.cached for record in each.records]) for each in (plain, run)]
    assert cached[0] != cached[1]
