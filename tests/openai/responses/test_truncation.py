"""`truncation: "auto"`: what leaves a conversation that is too long, and what stays."""

import json
from typing import Any

import pytest

from orca_jax.serve.openai.asked import TemplateMessage
from orca_jax.serve.openai.responses.api import messages_of
from orca_jax.serve.openai.responses.store import ResponseStore, items_of
from orca_jax.serve.openai.responses.truncation import cuts_of, without
from orca_jax.serve.openai.schema import responses_parser
from orca_jax.text.template_worker import MAX_OUTPUT
from tests.openai.responses.played import prompt_of, respond
from tests.serve.played import CONTEXT


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(name: str) -> list[dict[str, Any]]:
    return [
        {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": name, "output": f"result {name}"},
    ]


def messages(*items: dict[str, Any]) -> list[TemplateMessage]:
    values: dict[str, Any] = {"input": list(items)}
    call, _ = responses_parser.parse(json.dumps(values).encode())
    return messages_of("sys", items_of(ResponseStore(0), None, call))


def choices_of(talk: list[TemplateMessage]) -> list[list[TemplateMessage]]:
    return [without(talk, cut) for cut in cuts_of(talk)]


def texts(choice: list[TemplateMessage]) -> list[str]:
    return [message["content"] or "call" for message in choice]


def test_the_oldest_turns_leave_first_then_calls_with_their_results() -> None:
    talk = messages(
        user("1"),
        *called("a"),
        assistant("A"),
        user("2"),
        assistant("B"),
        user("3"),
        *called("b"),
        *called("c"),
    )
    found = [texts(choice) for choice in choices_of(talk)]
    assert found[0] == [
        "sys",
        "1",
        "call",
        "result a",
        "A",
        "2",
        "B",
        "3",
        "call",
        "result b",
        "call",
        "result c",
    ]
    assert found[-1] == ["sys", "3", "call", "result c"], (
        "the last call stays, and a result never loses its call"
    )
    assert ["sys", "2", "B", "3", "call", "result b", "call", "result c"] in found
    assert ["sys", "3", "call", "result b", "call", "result c"] in found
    sizes = [len(choice) for choice in found]
    assert sizes == sorted(sizes, reverse=True)


def test_late_system_messages_stay() -> None:
    talk = messages(user("1"), {"role": "developer", "content": "late"}, assistant("A"), user("2"))
    assert texts(choices_of(talk)[-1]) == ["sys", "late", "2"]
    assert [texts(choice) for choice in choices_of(messages(assistant("A")))] == [["sys", "A"]]


def test_the_cuts_of_a_very_long_conversation_are_made_when_they_are_tried() -> None:
    """Those of a conversation that the store has collected: all of them would have 450 million messages."""
    talk = [user("x"), assistant("y")] * 15_000
    cuts = cuts_of(talk)
    assert len(cuts) == 15_001 and without(talk, cuts[-1]) == talk[-2:]


@pytest.mark.conforms("responses.truncation")
@pytest.mark.parametrize("limit", [None, 16])
def test_a_long_conversation_is_answered(limit: int | None) -> None:
    """As few turns leave as needed, and the smaller of the limit and a quarter of the context is left."""
    turns = [one for number in range(60) for one in (user(f"<{number}>" + "x" * 9), assistant("y"))]
    fields: dict[str, Any] = {
        "input": [*turns, user("last")],
        "instructions": "keep me",
        "max_output_tokens": limit,
    }
    refused, _ = respond("x", **fields)
    assert (
        refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    )
    answer, link = respond("x", truncation="auto", **fields)
    assert answer.status_code == 200 and answer.json()["truncation"] == "auto"
    prompt = prompt_of(link)
    room = CONTEXT - (16 if limit else CONTEXT // 4)
    assert room - 45 < len(link.submitted[0].prompt_ids) <= room
    assert "keep me" in prompt and "last" in prompt and "<59>" in prompt and "<0>" not in prompt


def test_a_conversation_that_is_too_long_to_be_rendered_is_answered() -> None:
    turns = [one for _ in range(50) for one in (user("x" * 50_000), assistant("y" * 50_000))]
    assert sum(len(one["content"]) for one in turns) > MAX_OUTPUT
    answer, link = respond("x", truncation="auto", input=[*turns, user("last")])
    assert answer.status_code == 200, answer.text
    assert "last" in prompt_of(link) and "xx" not in prompt_of(link)


def test_what_must_stay_may_be_too_long() -> None:
    answer, _ = respond("x", truncation="auto", input=[user("a"), assistant("b"), user("x" * 5000)])
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_short_conversation_stays_whole() -> None:
    answer, link = respond("x", truncation="auto", input=[user("first"), assistant("b"), user("c")])
    assert answer.status_code == 200 and "first" in prompt_of(link)
