"""A decision has the same bits alone, together, beside other requests, from the cache and under every scheduler."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from orca_jax import LLM, Question, SamplingParams
from orca_jax.text.decisions.reads import TypedAnswer
from tests.programs import compiled_late, compiled_with

STATE = "The little dog was happy. It ran to the big tree and found a red ball under it. " * 4
WORDS = ("dog", "tree", "ball", "sun", "boy", "girl", "cat", "house")
pytestmark = pytest.mark.usefixtures("quick_compiles", "compiled_when_used")


def questions(number: int) -> list[Question]:
    """Questions of all kinds in turn."""
    found = []
    for index in range(number):
        word = WORDS[index % 8]
        kinds = (
            Question.yes_no(f"{word} number {index}", yes="it is there"),
            Question.choice(f"{index}: what did the {word} do?", ["ran", "slept", "ate"]),
            Question.score(f"{index}: how big is the {word}?", ["small", "middle", "big", "huge"]),
        )
        found.append(kinds[index % 3])
    return found


def made(**settings: Any) -> LLM:
    sizes = {"max_num_seqs": 16, "max_model_len": 512, "progress": False}
    return LLM("demo", **{"dtype": "float32", **sizes, **settings})


def bits(decisions: Sequence[TypedAnswer]) -> list[tuple[tuple[float, ...], float]]:
    return [(each.probabilities, each.label_mass) for each in decisions]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # one form of all programs: those of later tests are compiled with the fixture of their function
    with compiled_with(optimised=False), compiled_late(), made() as llm:
        yield llm
        llm.engine.pool.check_integrity()


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[tuple[float, ...], float]]:
    """Each question in a call of its own, and none from the cache."""
    return bits(
        [
            llm.decide(STATE, [question], cache_salt=str(index))[0]
            for index, question in enumerate(questions(24))
        ]
    )


def add_company(llm: LLM, number: int) -> None:
    """Queue other requests, which run in the iterations of the next call."""
    for index in range(number):
        params = SamplingParams(max_tokens=20 + index, temperature=1.0, seed=index)
        llm.engine.add_request(f"other {index}", list(range(20, 60 + 3 * index)), params)


def test_together_in_another_order_and_from_the_cache(llm: LLM, alone: list[Any]) -> None:
    asked = questions(24)
    assert bits(llm.decide(STATE, asked)) == alone
    assert bits(llm.decide(STATE, asked)) == alone, "from the cache"
    assert bits(llm.decide(STATE, asked[::-1], cache_salt="other")) == alone[::-1]


def test_beside_other_requests(llm: LLM, alone: list[Any]) -> None:
    add_company(llm, 32)
    assert bits(llm.decide(STATE, questions(24), cache_salt="company")) == alone
    while llm.engine.has_work:
        llm.engine.step()


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": "orca"},
        {"scheduler": "request_level"},
        {"max_num_batched_tokens": 48},
        {"scheduling_policy": "shortest", "enable_prefix_caching": False},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_under_other_schedulers_and_budgets(settings: dict[str, Any], alone: list[Any]) -> None:
    with made(**settings) as llm:
        add_company(llm, 12)
        assert bits(llm.decide(STATE, questions(24))) == alone
        llm.engine.pool.check_integrity()


def test_after_a_preemption(alone: list[Any]) -> None:
    """The read that computes the state loses its pages, and so do reads that have begun with them."""
    with made(max_num_batched_tokens=32) as llm:
        reading = llm._decision_texts.reading(STATE, questions(24), "given", 1.0, None, None)
        names = [f"read {index}" for index in range(24)]
        for name, read in zip(names, reading.reads, strict=True):
            llm.engine.add_request(name, read.prompt_ids, read.params(reading.shared, ""))
        pool = llm.engine.pool
        updates = []
        while llm.engine.has_work:
            updates += llm.engine.step()
            if pool.num_plans % 4 == 3 and pool.num_preemptions < 8:
                for request in [*pool.running.values()]:
                    pool.preempt(request)
            pool.check_integrity()
        assert pool.num_preemptions >= 8
        scores = {update.request_id: update.logprobs for update in updates}
        assert bits(reading.decisions([scores[name][0] for name in names])) == alone


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"quantization": "int4"}], ids=str)
def test_of_other_types(settings: dict[str, Any]) -> None:
    asked = questions(12)
    with made(**settings) as llm:
        wanted = bits(
            [llm.decide(STATE, [question], cache_salt=question.text)[0] for question in asked]
        )
        add_company(llm, 20)
        assert bits(llm.decide(STATE, asked)) == wanted
        assert bits(llm.decide(STATE, asked[::-1])) == wanted[::-1]
