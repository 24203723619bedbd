"""Answers to schemas are valid: all of them with `strict`, and without it apart from what is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.text.schemas.answers import answer, compiled, fault, faults
from tests.text.schemas.random_schemas import random_schema

SUITE = json.loads(Path(__file__).with_name("suite.json").read_text(encoding="utf-8"))["schemas"]
NUM_RANDOM = 403
ALL: list[Any] = [entry["schema"] for entry in SUITE] + [
    random_schema(seed) for seed in range(NUM_RANDOM)
]


def check(schemas: list[Any], seeds: range) -> dict[str, int]:
    """The number of schemas by what becomes of them, after a check of their answers."""
    counts = {"strict": 0, "loose": 0, "refused": 0, "endless": 0}
    for schema in schemas:
        kind, wrong = faults(schema, seeds)
        assert not wrong, (schema, wrong[0])
        counts[kind] += 1
    return counts


def test_a_part_of_all_answers_is_valid() -> None:
    counts = check(ALL[::20], range(2))
    assert counts["strict"] > 20 and counts["loose"] > 8 and counts["endless"] < 3


@pytest.mark.slow
def test_all_answers_are_valid() -> None:
    """990 schemas with six answers each. `pytest -s` prints the counts."""
    assert len(ALL) == 990
    counts = check(ALL, range(6))
    print(counts)
    assert counts["strict"] > 500 and counts["refused"] < 150 and counts["endless"] < 20


def test_the_check_finds_invalid_answers() -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "uniqueItems": True}
    text = answer(
        compiled({key: value for key, value in schema.items() if key != "uniqueItems"}), 1
    )
    assert text is not None and "non-unique" in str(fault(schema, text))
    assert faults(schema, range(2)) == ("loose", []), "what is left out is no fault"


def test_names_have_one_spelling() -> None:
    constraint = compiled(
        {"properties": {"a": {"type": "integer"}}, "additionalProperties": True, "type": "object"}
    )
    for token in b'{"':
        assert constraint.allowed() >> token & 1
        constraint.accept(token)
    constraint.accept(ord("\\"))
    assert not constraint.allowed() >> ord("u") & 1, "as \\u0061 the name would have any value"
