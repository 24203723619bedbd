"""Tool calls of `/v1/chat/completions`, free and forced, whole and streamed, with a played engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.openai.chats import (
    CALL,
    HERMES,
    MISTRAL,
    TOOLS,
    checked,
    deltas,
    error_of,
    message_of,
    only,
)
from tests.serve.played import chat, events, saying

NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.conforms("chat.tools", "chat.tool_choice")
def test_calls_of_the_models_own_accord() -> None:
    text = f"Let me see. {CALL}"
    answer, link = chat(
        saying(*[text[i : i + 7] for i in range(0, len(text), 7)]), HERMES, tools=TOOLS
    )
    message = message_of(answer)
    assert (
        message["content"] == "Let me see. "
        and answer.json()["choices"][0]["finish_reason"] == "tool_calls"
    )
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Oslo"}'}
    ]
    assert b"weather" in bytes(link.submitted[0].prompt_ids), "the template shows the tools"


@pytest.mark.conforms("chat.tools", "chat.tool_choice")
def test_calls_without_a_flag(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The format of calls comes from the chat template, unless a flag sets it; an unknown one is refused."""
    with caplog.at_level("INFO"):
        answer, _ = chat(saying(CALL), tools=TOOLS)
    assert message_of(answer)["tool_calls"][0]["function"]["name"] == "weather"
    assert "read as hermes" in caplog.text and "--tool-call-parser" in caplog.text
    assert "tool_calls" not in message_of(chat(saying(CALL), MISTRAL, tools=TOOLS)[0]), (
        "the flag wins"
    )
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools | tojson }}{{ messages[0].content }}", encoding="utf-8")
    unknown = ServerConfig(EngineConfig(model="m"), chat_template=str(template))
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": only("weather")}):
        error = error_of(chat(saying(CALL), unknown, tools=TOOLS, **fields)[0])
        assert error["param"] == "tool_choice" and "--tool-call-parser" in error["message"]
    forced, _ = chat(
        saying('[{"name": "clock", "arguments": {}}]'), unknown, tools=TOOLS, tool_choice="required"
    )
    assert message_of(forced)["tool_calls"]


def test_ids_of_calls_suit_the_template() -> None:
    """Mistral's templates refuse the next turn unless an id has nine characters."""
    forced: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    text = '[{"name": "clock", "arguments": {}}]'
    for config, size in ((MISTRAL, 9), (HERMES, 29)):
        (call,) = message_of(chat(saying(text), config, **forced)[0])["tool_calls"]
        assert (
            len(call["id"]) == size
            and call["id"].isascii()
            and call["id"].replace("_", "").isalnum()
        )


def test_streamed_calls() -> None:
    answer, _ = chat(saying("So: ", CALL[:20], CALL[20:], CALL), HERMES, tools=TOOLS, stream=True)
    first, *middle, last = deltas(answer)
    assert first == {"role": "assistant", "content": ""} and last == {}
    assert "".join(delta.get("content", "") for delta in middle) == "So: "
    calls = [call for delta in middle for call in delta.get("tool_calls", ())]
    begun = [call for call in calls if "id" in call]
    assert [call["index"] for call in begun] == [0, 1] and len({call["id"] for call in begun}) == 2
    for index in (0, 1):
        pieces = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert "".join(pieces) == '{"city": "Oslo"}'
    assert events(answer)[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.conforms("chat.parallel_tool_calls")
def test_one_call_where_one_was_asked_for() -> None:
    answer, _ = chat(saying(CALL, CALL), HERMES, tools=TOOLS, parallel_tool_calls=False)
    assert len(message_of(answer)["tool_calls"]) == 1


def test_what_looks_like_a_call_and_is_none_is_text() -> None:
    for text in (
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "<tool_call>{",
        "2 < 3",
    ):
        answer, _ = chat(saying(text), HERMES, tools=TOOLS)
        assert message_of(answer) == {"role": "assistant", "content": text, "refusal": None}
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
    answer, _ = chat(saying(CALL[:20], reason="length"), HERMES, tools=TOOLS)
    assert message_of(answer)["content"] == CALL[:20]
    assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.conforms("chat.tools", "chat.tool_choice")
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_arguments_go_out_in_pieces_once_the_name_is_known(choice: str) -> None:
    """From then on the text is a call, also if its JSON breaks or a stop string ends it."""
    required = '[{"name": "weather", "arguments": {"city": "Oslo"'
    text = CALL.removesuffix("}}</tool_call>") if choice == "auto" else required
    pieces = [text[i : i + 3] for i in range(0, len(text), 3)]
    streamed, _ = chat(
        saying(*pieces, " ?", "END"),
        HERMES,
        tools=TOOLS,
        tool_choice=choice,
        stream=True,
        stop="END",
    )
    calls = [call["function"] for delta in deltas(streamed) for call in delta.get("tool_calls", ())]
    assert calls[0]["name"] == "weather" and len(calls) > 4
    assert "".join(call["arguments"] for call in calls).startswith('{"city": "Oslo"')
    assert not any(delta.get("content") for delta in deltas(streamed))
    assert events(streamed)[-1]["choices"][0]["finish_reason"] == "tool_calls"
    whole, _ = chat(saying(text + " ?", "END"), HERMES, tools=TOOLS, tool_choice=choice, stop="END")
    assert whole.json()["choices"][0]["message"]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": "".join(call["arguments"] for call in calls),
    }


def test_tools_are_no_calls_unless_wanted() -> None:
    answer, link = chat(saying(CALL), HERMES, tools=TOOLS, tool_choice="none")
    assert message_of(answer)["content"] == CALL
    assert link.submitted[0].params.structured is None and b"weather" not in bytes(
        link.submitted[0].prompt_ids
    )


@pytest.mark.conforms("chat.tool_choice", "chat.parallel_tool_calls")
def test_forced_calls_are_a_schema() -> None:
    text = '[{"name": "weather", "arguments": {"city": "Rome"}}]'
    answer, link = chat(
        saying(text), tools=TOOLS, tool_choice="required", parallel_tool_calls=False
    )
    assert message_of(answer)["content"] is None
    structured = link.submitted[0].params.structured
    assert structured is not None and structured.kind == "json_schema"
    assert json.loads(structured.value)["maxItems"] == 1


def test_arguments_of_a_named_call_go_out_as_they_come() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    answer, link = chat(
        saying('{"city"', ': "Ro', 'me"}'), tools=TOOLS, tool_choice=named, stream=True
    )
    (*_, last) = events(checked(answer))
    assert (
        last["choices"][0]["finish_reason"] == "tool_calls"
        and link.submitted[0].params.structured is not None
    )
    calls = [call for delta in deltas(answer) for call in delta.get("tool_calls", ())]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"city": "Rome"}'
    assert calls[0]["function"]["name"] == "weather" and all(
        "name" not in call["function"] for call in calls[1:]
    )
    assert not any(delta.get("content") for delta in deltas(answer))
    whole = message_of(chat(saying('{"city": "Rome"}'), tools=TOOLS, tool_choice=named)[0])
    assert whole["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


CUT: list[tuple[Any, str, str]] = [
    (NAMED, '{"city": "Ro', '{"city": "Ro'),
    ("required", '[{"name": "weather", "arguments": {"city": "Ro', '{"city": "Ro'),
    ("required", '[{"name": "weather", "argu', ""),
]


@pytest.mark.conforms("chat.tool_choice")
@pytest.mark.parametrize(("choice", "text", "arguments"), CUT)
def test_a_forced_call_that_is_cut_is_the_same_call_whole_and_streamed(
    choice: Any, text: str, arguments: str
) -> None:
    """At the limit of tokens, the arguments are as far as they got, and the reason says so."""
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice}
    answer, _ = chat(saying(text, reason="length"), **fields)
    message, reason = message_of(answer), answer.json()["choices"][0]["finish_reason"]
    assert message["content"] is None and reason == "length"
    stream, _ = chat(saying(text[:9], text[9:], reason="length"), **fields, stream=True)
    assert events(stream)[-1]["choices"][0]["finish_reason"] == "length"
    assert not any(delta.get("content") for delta in deltas(stream))
    streamed = [
        call["function"] for delta in deltas(stream) for call in delta.get("tool_calls", ())
    ]
    (whole,) = message["tool_calls"]
    assert whole["function"] == {"name": "weather", "arguments": arguments}
    again = [{"role": "user", "content": "hi"}, message, {"role": "user", "content": "go on"}]
    assert chat(saying("x"), messages=again, **fields)[0].status_code == 200, (
        "a client may send it back"
    )
    assert (
        streamed[0]["name"] == "weather"
        and "".join(part["arguments"] for part in streamed) == arguments
    )


def test_a_forced_call_cut_by_a_stop_string_is_a_call() -> None:
    answer, _ = chat(saying('{"city": "Ro', 'me"}'), tools=TOOLS, tool_choice=NAMED, stop="me")
    (choice,) = answer.json()["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "weather",
        "arguments": '{"city": "Ro',
    }
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"
