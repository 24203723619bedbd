"""One row for the reads of a call: in the file, in the lines of a live engine, and in the data of a page."""

from pathlib import Path

import pytest

from orca_jax import LLM, Question, SamplingParams
from orca_jax.timeline.measure import token_times
from orca_jax.timeline.page_data import page_data
from orca_jax.timeline.read import load_timeline
from orca_jax.timeline.rows import joined, row_members
from orca_jax.timeline.spans import Span
from orca_jax.timeline.writer import Arrival

STATE = "a state of several pages of the cache, " * 3
QUESTIONS = [Question.choice(f"{index}?", ["a", "b"]) for index in range(5)]


def test_calls_in_a_row_are_rows_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    with LLM("preset:toy", max_model_len=1024, trace_file=str(path)) as llm:
        one, *_ = llm._decision_texts.reading(STATE, QUESTIONS, "given", 1.0, None, None).reads
        tokens = llm.engine.executor.stats.tokens
        llm.decide(STATE, QUESTIONS)
        needed = llm.engine.executor.stats.tokens - tokens
        llm.decide(STATE, QUESTIONS)
        llm.decide(STATE + "!", QUESTIONS[:2])
        llm.generate(["other"], SamplingParams(max_tokens=2), use_tqdm=False)
    timeline = load_timeline(str(path))
    assert list(row_members(timeline.arrivals).values()) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
        [10, 11],
        [12],
    ]
    first, _, third, last = page_data(timeline, token_times(timeline))["requests"]
    shared = timeline.arrivals[0].shared
    assert shared == one.prompt_ids.index(ord("Q"))
    assert first["prompt"] == shared + 5 * (len(one.prompt_ids) - shared)
    assert [first["reads"], first["generated"], first["reason"]] == [5, 5, "length"]
    assert sum(first["spans"][4::5]) == needed, "the tokens of all reads"
    assert (third["reads"], last["reads"], last["prompt"]) == (2, 1, 5)


@pytest.mark.parametrize("kinds", [("chunk", "waiting"), ("waiting", "chunk")])
def test_work_hides_waits(kinds: tuple[str, str]) -> None:
    parts = [[Span(2, 2, kind, 4, 3 * (kind == "chunk"))] for kind in kinds]  # type: ignore[arg-type]
    assert joined(parts) == [Span(2, 2, "chunk", 4, 3)]


def test_reads_of_a_call_that_began_before_the_timeline() -> None:
    arrivals = {n: Arrival(n, str(n), 0.0, 9, 1, call=3, shared=4) for n in (4, 5)}
    assert row_members(arrivals) == {4: [4], 5: [5]}
