"""Reads of decisions in the page, by Node.js: rows of calls, typed questions, and the words of their iterations."""

from pathlib import Path
from typing import Any

import pytest

from tests.playground.test_result import NODE, evaluate, folder

pytestmark = pytest.mark.skipif(NODE is None, reason="needs Node.js")
__all__ = ["folder"]  # a fixture


def span(kind: str, first: int, last: int, start: int = 0, tokens: int = 0) -> dict[str, Any]:
    return {"kind": kind, "first": first, "last": last, "start": start, "tokens": tokens}


def read(n: int, call: int, prompt: int, shared: int, state: str = "ended") -> dict[str, Any]:
    return {"n": n, "call": call, "prompt": prompt, "shared": shared, "state": state}


def test_the_reads_of_a_call_are_one_row(folder: Path) -> None:
    parts = [
        [span("chunk", 4, 4, 0, 20)],
        [span("waiting", 3, 4), span("chunk", 5, 5, 16, 7)],
        [span("waiting", 3, 4), span("chunk", 5, 5, 16, 9)],
    ]
    assert evaluate(folder, "reads.js", "m.joined(value)", parts) == [
        span("waiting", 3, 3),
        span("chunk", 4, 4, 0, 20),
        span("chunk", 5, 5, 16, 16),
    ]


def test_a_call_is_found_by_its_tokens(folder: Path) -> None:
    reads = [
        read(1, 1, 9, 0),
        read(2, 2, 30, 20),
        read(3, 2, 25, 20),
        read(4, 4, 30, 20, "running"),
        read(5, 4, 25, 20),
    ]
    script = (
        "[m.grouped(value).map((each) => each.length), m.callOf(value, 0, 35)?.map(({n}) => n)]"
    )
    assert evaluate(folder, "reads.js", script, reads) == [[1, 2, 2], [2, 3]]
    assert evaluate(folder, "reads.js", "m.callOf(value, 3, 35)", reads) is None


def test_questions_are_typed_by_their_marks(folder: Path) -> None:
    text = "Broken?\n\nTeam? | a | b c\nBad? | low < high"
    yes_no, choice, score = evaluate(folder, "questions.js", "m.questionsOf(value)", text)
    assert yes_no == {"id": "1", "question": "Broken?", "type": "yes_no"}
    assert choice["options"] == [{"name": "a"}, {"name": "b c"}]
    assert (score["type"], score["levels"]) == ("score", ["low", "high"])


def test_the_words_of_iterations(folder: Path) -> None:
    texts = [
        evaluate(folder, "questions.js", "m.endsText(value)", each)
        for each in (None, [{"iteration": 7, "count": 3}], [{"iteration": 7, "count": 1}] * 2)
    ]
    assert texts[:2] == ["", "All ran in iteration 7."]
    assert texts[2].startswith("Answers by iteration: 1 in 7, 1 in 7")
