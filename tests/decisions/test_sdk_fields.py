"""Every field of the types of the two official clients: honoured, ignored or refused.

The types are those of openai 3.57.0 and typesafe-sdk 0.7.5; the judge of decisions holds their names to these tables.
"""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import pytest

from tests.decisions.test_routes import CHOICE, PREDICATE, SCORE, SYSTEM, post, prompt_of

Use = Literal["honoured", "ignored", "refused"]
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
_ITEM: dict[str, Use] = {"call_id": "honoured", "id": "ignored", "status": "ignored"}
_QUESTION: dict[str, Use] = {"type": "honoured", "name": "honoured", "instructions": "honoured"}
OF_OPENAI: dict[str, tuple[tuple[Any, ...], dict[str, Use]]] = {
    "call": (
        (),
        {
            "input": "honoured",
            "model": "honoured",
            "questions": "honoured",
            "prompt_cache_key": "ignored",
            "prompt_cache_options": "ignored",
            "safety_identifier": "ignored",
        },
    ),
    "message": (
        ("input", 1),
        {"type": "honoured", "role": "honoured", "content": "honoured", "phase": "ignored"},
    ),
    "input text": (
        ("input", 1, "content", 0),
        {"type": "honoured", "text": "honoured", "prompt_cache_breakpoint": "ignored"},
    ),
    "input JSON": (
        ("input", 1, "content", 1),
        {"type": "honoured", "data": "honoured", "prompt_cache_breakpoint": "ignored"},
    ),
    "output text": (("input", 2, "content", 0), {"type": "honoured", "text": "honoured"}),
    "refusal": (("input", 2, "content", 1), {"type": "honoured", "refusal": "honoured"}),
    "function call": (
        ("input", 3),
        {
            **_ITEM,
            "type": "honoured",
            "name": "honoured",
            "arguments": "honoured",
            "namespace": "ignored",
        },
    ),
    "function output": (("input", 4), {**_ITEM, "type": "honoured", "output": "honoured"}),
    "custom call": (
        ("input", 5),
        {
            **_ITEM,
            "type": "honoured",
            "name": "honoured",
            "input": "honoured",
            "namespace": "ignored",
        },
    ),
    "custom output": (("input", 6), {**_ITEM, "type": "honoured", "output": "honoured"}),
    "predicate": (("questions", 0), _QUESTION),
    "choice": (("questions", 1), {**_QUESTION, "choices": "honoured"}),
    "option": (("questions", 1, "choices", 0), {"value": "honoured", "description": "honoured"}),
    "score": (("questions", 2), {**_QUESTION, "levels": "honoured"}),
    "level": (("questions", 2, "levels", 0), {"label": "honoured", "description": "honoured"}),
    "cache options": (("prompt_cache_options",), {"mode": "ignored", "ttl": "ignored"}),
}


TYPESAFE: dict[str, Any] = {
    "model": "m",
    "state": "s",
    "questions": {**SYSTEM, "n": {"type": "noul", "criteria": {"true": "a", "false": "b"}}},
}
OF_TYPESAFE: dict[str, tuple[tuple[Any, ...], dict[str, Use]]] = {
    "request": (
        (),
        {"model": "honoured", "state": "honoured", "questions": "honoured", "assets": "refused"},
    ),
    "noul": (
        ("questions", "n"),
        {"type": "honoured", "instructions": "honoured", "criteria": "honoured"},
    ),
    "noul criteria": (("questions", "n", "criteria"), {"true": "honoured", "false": "honoured"}),
    "choice": (
        ("questions", "c"),
        {"type": "honoured", "instructions": "honoured", "criteria": "honoured"},
    ),
    "score": (
        ("questions", "s"),
        {"type": "honoured", "instructions": "honoured", "criteria": "honoured"},
    ),
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
