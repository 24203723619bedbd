"""Judging answers by hand: right and ended, ended without an answer, and loops."""

from types import SimpleNamespace
from typing import Any

import pytest

from lab.smollm2.sampling import CANDIDATES, Judged, Question, figures, judge, read_questions
from orca_jax.text.generation_config import _OF_SMOLLM2
from tests.project.source import ROOT

PARIS = Question("What is the capital of France?", r"\bparis\b")
POEM = Question("Write a short poem about the sea.")


def answer(text: str, reason: str, ids: list[int]) -> Any:
    return SimpleNamespace(
        outputs=[SimpleNamespace(text=text, finish_reason=reason, token_ids=ids)]
    )


@pytest.mark.parametrize(
    ("question", "text", "reason", "ids", "expected"),
    [
        (PARIS, "It is Paris.", "stop", [1, 2], Judged(True, False, True, 2)),
        (PARIS, "It is Lyon.", "stop", [1, 2, 3], Judged(True, False, False, 3)),
        (PARIS, "Paris, Paris, Paris", "length", [1, 2] * 40, Judged(False, True, False, 80)),
        (
            PARIS,
            "a long and varied text on Paris",
            "length",
            list(range(80)),
            Judged(False, False, False, 80),
        ),
        (POEM, "The sea", "stop", [5], Judged(True, False, None, 1)),
        (POEM, "waves waves", "length", [5] * 10, Judged(False, False, None, 10)),
    ],
)
def test_answers_by_hand(
    question: Question, text: str, reason: str, ids: list[int], expected: Judged
) -> None:
    assert judge(question, answer(text, reason, ids)) == expected


def test_figures_count_answers_with_a_right_one() -> None:
    judged = [
        Judged(True, False, True, 4),
        Judged(False, True, False, 8),
        Judged(True, False, None, 3),
    ]
    assert figures(judged) == ["1 of 2", "2 of 3", "1", "5"]


def test_the_table_of_the_page_has_every_candidate_and_the_default_is_one() -> None:
    page = (ROOT / "docs" / "smollm2.md").read_text(encoding="utf-8")
    assert [
        line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if " of 4" in line
    ] == [*CANDIDATES]
    assert dict(_OF_SMOLLM2) == CANDIDATES["greedy"]
    questions = read_questions()
    assert len(questions) == 50 and sum(question.right is not None for question in questions) == 48
