"""Every field of the types of the two official clients: honoured, ignored or refused.

The types are those of openai 3.57.0 and typesafe-sdk 0.7.5, by the tables of `sdk_fields.py`.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest

from tests.decisions.sdk_fields import OF_OPENAI, OF_TYPESAFE, Use
from tests.decisions.test_routes import CHOICE, PREDICATE, SCORE, SYSTEM, post, prompt_of

TEXT = {"type": "input_text", "text": "t"}
BREAKPOINT = {"mode": "explicit"}
USER = {"type": "message", "role": "user", "content": [TEXT]}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"}

# The types of a call, each as a part of this call, with its path.
OPENAI: dict[str, Any] = {
    "model": "m",
    "input": [
        {"type": "message", "role": "system", "content": "s"},
        {**USER, "content": [TEXT, {"type": "input_json", "data": {"a": 1}}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "o"},
                {"type": "refusal", "refusal": "r"},
            ],
        },
        CALL,
        {"type": "function_call_output", "call_id": "c", "output": "y"},
        CUSTOM,
        {"type": "custom_tool_call_output", "call_id": "c", "output": "z"},
        USER,
    ],
    "questions": [PREDICATE, CHOICE, SCORE],
    "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
}

TYPESAFE: dict[str, Any] = {
    "model": "m",
    "state": "s",
    "questions": {**SYSTEM, "n": {"type": "noul", "criteria": {"true": "a", "false": "b"}}},
}
REFUSED = {
    "/v1/decisions": [
        (
            ("input", 1, "content", 0),
            {"type": "input_image", "image_url": "data:", "detail": "low"},
        ),
        (("questions", 0, "instructions"), [{"type": "input_image", "image_url": "data:"}]),
    ],
    "/v1/systemone": [(("questions", "n"), {"type": "box", "instructions": "where?"})],
}
VALUES: dict[str, Any] = {
    "prompt_cache_options": {"mode": "explicit"},
    "prompt_cache_breakpoint": {"mode": "explicit"},
    "phase": "final_answer",
    "status": "incomplete",
    "mode": "explicit",
    "ttl": "30m",
}
"""Values of ignored fields; the others are texts."""
CALLS = {"/v1/decisions": (OPENAI, OF_OPENAI), "/v1/systemone": (TYPESAFE, OF_TYPESAFE)}
CASES = [
    pytest.param(path, (*place, field), use, id=f"{path} {name}: {field}")
    for path, (_, types) in CALLS.items()
    for name, (place, fields) in types.items()
    for field, use in fields.items()
]


def changed(body: Any, place: Sequence[Any], value: Any) -> Any:
    """A copy of a body with another value at a place."""
    whole = copy.deepcopy(body)
    part = whole
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    return whole


def outcome(path: str, body: Any) -> tuple[int, Any, list[str]]:
    """The status, the answers or the error, and the prompts."""
    answer, submitted, _ = post(path, body)
    found = answer.json()
    return answer.status_code, found.get("answers", found), [prompt_of(each) for each in submitted]


@pytest.mark.parametrize(("path", "place", "use"), CASES)
def test_a_field_is_honoured_ignored_or_refused(path: str, place: Sequence[Any], use: Use) -> None:
    body, _ = CALLS[path]
    plain = outcome(path, body)
    assert plain[0] == 200
    if use == "ignored":
        given = changed(body, place, VALUES.get(place[-1], "other"))
        assert outcome(path, given) == plain
        return
    found = outcome(path, changed(body, place, {"odd": [1]}))
    assert found != plain, "the value is read"
    if use == "refused":
        assert found[0] in (400, 422)
        assert place[-1] in str(found[1])


@pytest.mark.parametrize(
    ("path", "place", "value"),
    [(path, *each) for path, refused in REFUSED.items() for each in refused],
)
def test_images_and_boxes_are_refused_by_name(path: str, place: Sequence[Any], value: Any) -> None:
    status, error, prompts = outcome(path, changed(CALLS[path][0], place, value))
    assert status in (400, 422) and not prompts
    assert "type" in str(error)
