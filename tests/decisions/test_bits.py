"""A decision has the same bits alone, together, beside other requests, from the cache and under every scheduler."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from orca_jax import LLM, Question, SamplingParams
from orca_jax.assembly.engine import build_engine
from orca_jax.engine import Engine
from orca_jax.text.decisions.reads import Readout, TypedAnswer
from orca_jax.values.request import Urgency
from tests.covering import slow
from tests.decisions.k_quants import DEMO, write_k_quants
from tests.kernels.native.machine import library_of
from tests.programs import compiled_late, compiled_with, few_sizes

STATE = "The little dog was happy. It ran to the big tree and found a red ball under it. " * 4
NUM = 12
WORDS = ("dog", "tree", "ball", "sun", "boy", "girl", "cat", "house")
pytestmark = pytest.mark.usefixtures("few_programs", "quick_compiles", "compiled_when_used")


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
    return LLM(**{"model": "demo", "dtype": "float32", **sizes, **settings})


def bits(decisions: Sequence[TypedAnswer]) -> list[tuple[tuple[float, ...], float]]:
    return [(each.probabilities, each.label_mass) for each in decisions]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # one form of all programs: those of later tests are compiled with the fixture of their function
    with few_sizes(), compiled_with(optimised=False), compiled_late(), made() as llm:
        yield llm
        llm.engine.pool.check_integrity()


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[tuple[tuple[float, ...], float]]:
    """Each question in a call of its own, and none from the cache."""
    return bits(
        [
            llm.decide(STATE, [question], cache_salt=str(index))[0]
            for index, question in enumerate(questions(NUM))
        ]
    )


def reading_of(llm: LLM) -> Readout:
    return llm._decision_texts.reading(STATE, questions(NUM), "given", 1.0, None, None)


def add_company(llm: LLM, number: int) -> None:
    """Queue other requests, which run in the iterations of the next call."""
    for index in range(number):
        params = SamplingParams(max_tokens=20 + index, temperature=1.0, seed=index)
        llm.engine.add_request(f"other {index}", list(range(20, 60 + 3 * index)), params)


def test_together_in_another_order_and_from_the_cache(llm: LLM, alone: list[Any]) -> None:
    asked = questions(NUM)
    assert bits(llm.decide(STATE, asked)) == alone
    assert bits(llm.decide(STATE, asked)) == alone, "from the cache"
    assert bits(llm.decide(STATE, asked[::-1], cache_salt="other")) == alone[::-1]


def test_beside_other_requests(llm: LLM, alone: list[Any]) -> None:
    add_company(llm, 20)
    assert bits(llm.decide(STATE, questions(NUM), cache_salt="company")) == alone
    while llm.engine.has_work:
        llm.engine.step()


@pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": "orca"},
        slow({"scheduler": "request_level"}),
        {
            "max_num_batched_tokens": 48,
            "scheduling_policy": "shortest",
            "enable_prefix_caching": False,
        },
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_under_other_schedulers_and_budgets(settings: dict[str, Any], alone: list[Any]) -> None:
    with made(**settings) as llm:
        add_company(llm, 12)
        assert bits(llm.decide(STATE, questions(NUM))) == alone
        llm.engine.pool.check_integrity()


def run_reads(
    engine: Engine, reading: Readout, urgencies: Sequence[Urgency], after_step: Callable[[], None]
) -> list[tuple[tuple[float, ...], float]]:
    """Run the reads of a call, with an urgency for each, in an engine without `LLM`."""
    names = [f"read {index}" for index in range(len(reading.reads))]
    for name, read, urgency in zip(names, reading.reads, urgencies, strict=True):
        params = read.params(reading.shared, "")
        engine.add_request(name, read.prompt_ids, params, urgency=urgency)
    updates = []
    while engine.has_work:
        updates += engine.step()
        after_step()
        engine.pool.check_integrity()
    scores = {update.request_id: update.logprobs for update in updates if update.logprobs}
    return bits(reading.decisions([scores[name][0] for name in names]))


@pytest.mark.parametrize("policy", ["fair", slow("deadline")])
def test_of_many_callers(policy: str, llm: LLM, alone: list[Any]) -> None:
    """Reads of one call that take turns with each other, and with requests of other callers."""
    reading = reading_of(llm)
    config = replace(llm.timeline_header.config, scheduling_policy=policy)
    with build_engine(replace(config, max_num_batched_tokens=200)) as built:
        for index in range(12):
            params = SamplingParams(max_tokens=20 + index, temperature=1.0, seed=index)
            prompt = list(range(20, 60 + 3 * index))
            urgency = Urgency(tenant=str(index % 3), deadline=float(1 + index))
            built.engine.add_request(f"other {index}", prompt, params, urgency=urgency)
        urgencies = [Urgency(tenant=str(n % 4), deadline=60.0 - n % 7) for n in range(NUM)]
        assert run_reads(built.engine, reading, urgencies, lambda: None) == alone


def test_after_a_preemption(alone: list[Any]) -> None:
    """The read that computes the state loses its pages, and so do reads that have begun with them."""
    with made(max_num_batched_tokens=32) as llm:
        pool = llm.engine.pool

        def preempt() -> None:
            if pool.num_plans % 4 == 3 and pool.num_preemptions < 8:
                for request in [*pool.running.values()]:
                    pool.preempt(request)

        assert run_reads(llm.engine, reading_of(llm), [Urgency()] * NUM, preempt) == alone
        assert pool.num_preemptions >= 8


@pytest.fixture(scope="module")
def k_quants(tmp_path_factory: pytest.TempPathFactory) -> str:
    library_of()
    return str(write_k_quants(tmp_path_factory.mktemp("k_quants") / "demo.gguf"))


@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"model": "k_quants"}, 6),
        slow({"dtype": "bfloat16"}, NUM),
        slow({"quantization": "int4"}, NUM),
    ],
    ids=str,
)
def test_of_other_types(
    settings: dict[str, Any], number: int, request: pytest.FixtureRequest
) -> None:
    if settings.get("model") == "k_quants":
        settings = {"model": request.getfixturevalue("k_quants"), "tokenizer": str(DEMO)}
    asked = questions(number)
    with made(**settings) as llm:
        if "tokenizer" in settings:
            assert llm._built.summary.products == "native", "the bits of the file"
        wanted = bits(
            [llm.decide(STATE, [question], cache_salt=question.text)[0] for question in asked]
        )
        assert len(set(wanted)) > number // 2, "questions differ"
        add_company(llm, 8)
        assert bits(llm.decide(STATE, asked)) == wanted
        assert bits(llm.decide(STATE, asked[::-1])) == wanted[::-1], "from the cache"
