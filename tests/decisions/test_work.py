"""The state of a call is computed once: tokens that the executor processed, counted."""

from collections.abc import Iterator
from typing import Any

import pytest

from orca_jax import LLM, Question
from orca_jax.text.decisions.reads import Readout

STATE = "a state that is longer than several pages of the cache, " * 6
# The first letters differ, so that no question continues the page of another one.
QUESTIONS = [Question.choice("", [letter * 9, "else"]) for letter in "abcdefghijklmnopqrst"]


def made(**settings: Any) -> LLM:
    sizes = {"max_num_seqs": 8, "max_model_len": 1024, "page_size": 16, "progress": False}
    return LLM("preset:toy", **{**sizes, **settings})


@pytest.fixture(params=[None, False], ids=["reuse", "no reuse"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with made(enable_prefix_caching=request.param) as llm:
        yield llm
        llm.engine.pool.check_integrity()
        assert not llm.engine.has_work


def reading_of(llm: LLM) -> Readout:
    return llm._decision_texts.reading(STATE, QUESTIONS, "given", 1.0, None, None)


def computed(llm: LLM, call: Any) -> int:
    before = llm.engine.executor.stats.tokens
    call()
    return llm.engine.executor.stats.tokens - before


def test_the_state_is_computed_once_and_each_question_its_own(llm: LLM) -> None:
    reading = reading_of(llm)
    own = [len(read.prompt_ids) - reading.shared for read in reading.reads]
    common = len("A: ")  # of all questions, and so found in the page of the first one
    wanted = reading.shared + sum(own) - common * (len(own) - 1)
    assert computed(llm, lambda: llm.decide(STATE, QUESTIONS)) == wanted
    again = computed(llm, lambda: llm.decide(STATE, QUESTIONS))
    if llm.engine.pool.reuses_prefixes:
        assert again == len(QUESTIONS), "one token of each question"
    else:
        assert again == wanted, "nothing is reused between calls"


def test_two_calls_at_once_share_their_state_only_with_reuse(llm: LLM) -> None:
    reading = reading_of(llm)
    for salt in ("a", "a"):
        for index, read in enumerate(reading.reads[:4]):
            name = f"{llm.engine.pool.num_arrived} {index}"
            llm.engine.add_request(name, read.prompt_ids, read.params(reading.shared, salt))
    before = llm.engine.executor.stats.tokens
    while llm.engine.has_work:
        llm.engine.step()
    most = reading.shared + sum(len(read.prompt_ids) - reading.shared for read in reading.reads[:4])
    assert llm.engine.executor.stats.tokens - before <= most + 4


def test_requests_of_no_call_reuse_nothing_without_reuse() -> None:
    with made(enable_prefix_caching=False) as llm:
        prompt = list(range(100))
        llm.generate([prompt, prompt], use_tqdm=False)
        before = llm.engine.executor.stats.tokens
        outputs = llm.generate([prompt], use_tqdm=False)
        assert (
            llm.engine.executor.stats.tokens - before
            == 100 + len(outputs[0].outputs[0].token_ids) - 1
        )
        assert outputs[0].num_cached_tokens == 0
