"""Reasoning in chats: apart from the answer, whole and streamed, counted, and given back to the template."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orca_jax.link.wire import Submit
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.openai.chats import TOOLS, deltas, message_of
from tests.serve.played import News, Stage, chat, events, on_stage, saying, update, user

# A template with tags, as Qwen's: it shows tools, and writes an empty thought if thinking is off.
TEMPLATE = """{{ tools }}{% for m in messages %}{{ m.role }}: \
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{% endfor %}assistant:{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"""
OPEN = TEMPLATE + "<think>\n"
THOUGHT = "<think>\nLet me see.\n</think>\n\n"

Made = Callable[..., ServerConfig]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(template: str = TEMPLATE, **fields: Any) -> ServerConfig:
        path = tmp_path / "template.jinja"
        path.write_text(template, encoding="utf-8")
        config = EngineConfig(model="m")
        return ServerConfig(config, chat_template=str(path), tool_call_parser="hermes", **fields)

    return make


def cut(text: str, size: int = 5) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@pytest.mark.parametrize(
    ("template", "said"), [(TEMPLATE, THOUGHT), (OPEN, THOUGHT.removeprefix("<think>\n"))]
)
def test_reasoning_is_apart_from_the_answer(made: Made, template: str, said: str) -> None:
    answer, _ = chat(saying(*cut(said + "Yes.")), made(template))
    message = message_of(answer)
    assert (message["content"], message["reasoning"], message["reasoning_content"]) == (
        "Yes.",
        "Let me see.",
        "Let me see.",
    )
    stream, _ = chat(saying(*cut(said + "Yes.")), made(template), stream=True)
    pieces = deltas(stream)
    assert "".join(piece.get("content", "") for piece in pieces) == "Yes."
    for name in ("reasoning", "reasoning_content"):
        assert "".join(piece.get(name, "") for piece in pieces) == "Let me see."


def test_a_call_after_reasoning(made: Made) -> None:
    text = THOUGHT + '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    message = message_of(chat(saying(*cut(text)), made(), tools=TOOLS)[0])
    assert message["content"] is None and message["reasoning"] == "Let me see."
    assert message["tool_calls"][0]["function"]["name"] == "clock"


def test_reasoning_without_an_end(made: Made) -> None:
    answer, _ = chat(saying("<think>Let me", reason="length"), made())
    assert message_of(answer)["reasoning"] == "Let me" and message_of(answer)["content"] == ""


@pytest.mark.conforms("chat.enable_thinking")
def test_tags_are_text_if_thinking_is_over_or_unknown(made: Made) -> None:
    for config, fields in (
        (made(), {"enable_thinking": False}),
        (made(reasoning_parser="none"), {}),
    ):
        message = message_of(chat(saying(THOUGHT + "Yes."), config, **fields)[0])
        assert message["content"] == THOUGHT + "Yes." and "reasoning" not in message


@pytest.mark.parametrize("size", [1, 4, 100])
def test_usage_counts_the_tokens_of_reasoning(made: Made, size: int) -> None:
    """Also if one update has the end of the reasoning and the begin of the answer."""
    text = THOUGHT + "Yes."
    counted = len("<think>\nLet me see.\n</think>")
    answer, _ = chat(saying(*cut(text, size)), made())
    usage = answer.json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": counted}
    stream, _ = chat(
        saying(*cut(text, size)), made(), stream=True, stream_options={"include_usage": True}
    )
    assert events(stream)[-1]["usage"] == usage
    none = chat(saying("Yes."), made())[0].json()["usage"]
    assert none["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_usage_of_several_choices_and_of_a_stop_string(made: Made) -> None:
    def script(submit: Submit) -> list[News]:
        return [
            update(submit, *b"<think>ab"),
            update(submit, *b"cSTOPde"),
            update(submit, *b"</think>f"),
        ]

    answer, link = chat(script, made(), n=2, stop="STOP")
    assert [choice["message"]["reasoning"] for choice in answer.json()["choices"]] == ["abc", "abc"]
    assert answer.json()["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 2 * len("<think>abcSTOP")
    }
    assert len(link.aborted) == 2


@pytest.mark.conforms("chat.messages")
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_back_to_the_template(made: Made, name: str, tmp_path: Path) -> None:
    messages = [user("x"), {"role": "assistant", "content": "Yes.", name: "hm"}, user("y")]
    answer, link = chat(saying("x"), made(), messages=messages)
    assert b"<think>hm</think>Yes." in bytes(link.submitted[0].prompt_ids)
    assert "x-orca-ignored-fields" not in answer.headers
    answer, _ = chat(saying("x"), made("{{ messages[1].content }}"), messages=messages)
    assert answer.headers["x-orca-ignored-fields"] == f"messages.{name}"


def test_a_format_begins_after_the_reasoning(made: Made) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    for fields in ({"response_format": schema}, {"tools": TOOLS, "tool_choice": "required"}):
        for template, kind in (
            (TEMPLATE, "composed"),
            (OPEN, "composed"),
            (TEMPLATE + "<think></think>", "json_schema"),
        ):
            _, link = chat(saying("{}"), made(template), **fields)
            structured = link.submitted[0].params.structured
            assert structured is not None and structured.kind == kind


def test_reasoning_in_the_other_apis(made: Made) -> None:
    """Items of responses and blocks of messages have it, and their usage its tokens."""
    counted = len("<think>\nLet me see.\n</think>")

    async def act(stage: Stage) -> None:
        async with stage.http() as http:
            body: dict[str, Any] = {"model": "m", "input": "x"}
            response = (await http.post("/v1/responses", json=body)).json()
            assert [item["type"] for item in response["output"]] == ["reasoning", "message"]
            assert response["output"][0]["content"][0]["text"] == "Let me see."
            assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == counted
            body = {"model": "m", "max_tokens": 99, "messages": [user("x")]}
            message = (await http.post("/v1/messages", json=body)).json()
            assert [block["type"] for block in message["content"]] == ["thinking", "text"]
            assert message["content"][0]["thinking"] == "Let me see."
            assert message["usage"]["output_tokens_details"]["thinking_tokens"] == counted
            for path in ("/v1/responses", "/v1/messages"):
                streamed = (
                    {**body, "stream": True}
                    if path == "/v1/messages"
                    else {"input": "x", "stream": True}
                )
                text = (await http.post(path, json=streamed)).text
                assert "Let me see." in text and "Yes." in text and "<think>" not in text

    on_stage(saying(THOUGHT + "Yes."), act, made(), chats=True)
