"""What the APIs share below their bodies: system messages, names of fields in errors, pieces of text and calls."""

from typing import Any

import pytest

from orca_jax.serve.openai.asked import TemplateMessage
from orca_jax.serve.openai.conversation import plain_messages, settled_system
from orca_jax.serve.openai.errors import ApiError, named
from orca_jax.serve.openai.generation import Piece, joined, whole_parts
from orca_jax.serve.openai.schema.chat import (
    AssistantMessage,
    ChatMessage,
    DeveloperMessage,
    SystemMessage,
    TextPart,
    UserMessage,
)
from orca_jax.text.template import ChatTemplate
from orca_jax.text.template_trials import keeps_late_system
from orca_jax.text.tools import Reasoning, StreamedArguments, ToolCall

LATE: list[ChatMessage] = [
    UserMessage("a"),
    AssistantMessage("b"),
    DeveloperMessage("now"),
    UserMessage("c"),
]


def settled(messages: list[ChatMessage], *, keeps_late: bool) -> list[TemplateMessage]:
    return settled_system(plain_messages(messages), keeps_late=keeps_late)


def roles(messages: list[TemplateMessage]) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in messages]


def test_leading_system_messages_become_one() -> None:
    parts = [TextPart("text", "of"), TextPart("text", "parts")]
    leading: list[ChatMessage] = [
        SystemMessage("one"),
        DeveloperMessage(parts),
        SystemMessage(""),
        UserMessage("x"),
    ]
    assert roles(settled(leading, keeps_late=True)) == [
        ("system", "one\n\nof\nparts"),
        ("user", "x"),
    ]
    assert roles(settled([SystemMessage(""), UserMessage("x")], keeps_late=True)) == [("user", "x")]


def test_a_late_system_message_stays_or_is_one_of_the_user() -> None:
    assert settled(LATE, keeps_late=True) == plain_messages(LATE)
    moved = [("user", "a"), ("assistant", "b"), ("user", "now\n\nc")]
    assert roles(settled(LATE, keeps_late=False)) == moved
    last = settled(LATE[:3], keeps_late=False)
    assert roles(last) == [*moved[:2], ("user", "now")], "no message of the user follows"
    early = [LATE[0], SystemMessage("at once"), SystemMessage(""), *LATE[1:]]
    assert roles(settled(early, keeps_late=False)) == [("user", "a\n\nat once"), *moved[1:]]
    between = [LATE[0], SystemMessage("now"), LATE[3]]
    assert roles(settled(between, keeps_late=False)) == [("user", "a\n\nnow\n\nc")]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", True),
        ("{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}", False),
        ("{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
         "{{ m.content }}{% endfor %}", False),
    ],
)  # fmt: skip
def test_the_template_is_tried(template: str, expected: bool) -> None:
    with ChatTemplate({"default": template}, {}) as loaded:
        assert keeps_late_system(loaded) is expected


def test_errors_name_the_fields_of_their_body() -> None:
    names = {"messages": "input", "max_tokens": "max_output_tokens"}
    error = ApiError(
        400,
        "messages has 9 characters; max_tokens_of_all, max_tokens",
        "messages[2].content",
        code="c",
    )
    error.rename(names)
    assert (error.status, error.param, error.code) == (400, "input", "c")
    assert error.message == "input has 9 characters; max_tokens_of_all, max_output_tokens"
    other = ApiError(400, "tools: no", "tools")
    other.rename(names)
    assert other.param == "tools"
    assert named("messages.messages", names) == "input.messages", "the rest is not a path"


def test_parts_of_pieces_are_joined() -> None:
    calls = [ToolCall("f", '{"x"'), ToolCall(None, ": 1}"), ToolCall("g", "{}")]
    parts = [Reasoning("a"), Reasoning("b"), "c", "d", *calls, "e"]
    whole = [Reasoning("ab"), "cd", ToolCall("f", '{"x": 1}'), ToolCall("g", "{}"), "e"]
    assert whole_parts(parts) == whole
    pieces = [
        Piece(0, "x"),
        Piece(0, "y", parts=["y", calls[0]]),
        Piece(0, "", "tool_calls", parts=calls[1:2]),
    ]
    found = joined(pieces)
    assert found.text == "xy" and found.reason == "tool_calls"
    assert whole_parts(found.parts) == ["xy", ToolCall("f", '{"x": 1}')]
    assert joined(pieces[:1]).parts == () and joined(pieces[:1]).in_order() == ("x",)


def test_arguments_are_streamed_as_pieces_of_one_call() -> None:
    parser = StreamedArguments("f")
    assert [*parser.push('{"a'), *parser.push('": 1}'), *parser.finish()] == [
        ToolCall("f", '{"a'),
        ToolCall(None, '": 1}'),
    ]
