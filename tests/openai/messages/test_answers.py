"""Answers of `/v1/messages`, whole and streamed, held to the SDK's own types."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.link.wire import Submit
from orca_jax.serve.openai.generation import Piece
from orca_jax.serve.openai.messages.answer import SIGNATURE, MessagesRenderer
from orca_jax.serve.openai.schema.answers import PromptDetails, Usage
from orca_jax.server_config import ServerConfig
from orca_jax.text.tools import Reasoning, ToolCall
from orca_jax.values.config import EngineConfig
from tests.openai.chats import CALL, HERMES, MISTRAL
from tests.openai.messages.sdk_shapes import check_stream, content_of
from tests.openai.messages.talks import COUNT, TOOLS, Talk, ask, both, talk
from tests.serve.played import CONTEXT, News, saying, update, user


@pytest.mark.conforms(
    "POST /v1/messages", "messages.model", "messages.stream", "messages.max_tokens"
)
def test_text() -> None:
    whole, events = both(saying("Hel", "lo."), max_tokens=9)
    assert whole["content"] == content_of(events) == [{"type": "text", "text": "Hello."}]
    assert whole["id"].startswith("msg_") and whole["model"] == "m" and whole["role"] == "assistant"
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    start, end = events[0]["message"], events[-2]
    assert (
        start["content"] == []
        and start["stop_reason"] is None
        and start["usage"]["output_tokens"] == 0
    )
    assert (
        end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        and end["usage"] == whole["usage"]
    )


def test_cached_tokens_are_counted_apart() -> None:
    def script(submit: Submit) -> list[News]:
        return [
            update(submit, 65, num_cached=7, num_written=2),
            update(submit, 256, finish_reason="stop"),
        ]

    async def act(found: Talk) -> None:
        counted = (await found.post(COUNT)).json()["input_tokens"]
        whole = (await found.post()).json()["usage"]
        events = check_stream((await found.post(stream=True)).text)
        for usage in (whole, events[0]["message"]["usage"], events[-2]["usage"]):
            assert (
                usage["cache_read_input_tokens"] == 7 and usage["cache_creation_input_tokens"] == 2
            )
            assert usage["input_tokens"] + 9 == counted == len(found.link.submitted[-1].prompt_ids)

    talk(act, script)


@pytest.mark.conforms("messages.stop_sequences", "messages.stop")
def test_stop_sequences() -> None:
    for fields in (
        {"stop_sequences": ["END", "no"]},
        {"stop": "END"},
        {"stop": ["x"], "stop_sequences": ["END"]},
    ):
        whole, events = both(saying("one E", "ND two"), **fields)
        assert content_of(events) == whole["content"] == [{"type": "text", "text": "one "}]
        assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")


def test_limits() -> None:
    whole, events = both(saying("abc", reason="length"), max_tokens=3)
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "max_tokens"
    for limit in (-1, None):
        whole, events = both(saying("abc", reason="length"), max_tokens=limit)
        assert (
            whole["stop_reason"]
            == events[-2]["delta"]["stop_reason"]
            == "model_context_window_exceeded"
        )
    answer = ask(saying("x"), max_tokens=0)
    assert answer.status_code == 400 and "max_tokens" in answer.json()["error"]["message"]


def test_an_empty_answer() -> None:
    whole, events = both(saying())
    assert whole["content"] == content_of(events) == []


def test_calls() -> None:
    text = f"Let me see. {CALL}{CALL}"
    whole, events = both(
        saying(*[text[i : i + 7] for i in range(0, len(text), 7)]), HERMES, tools=TOOLS
    )
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "tool_use"
    first, *calls = whole["content"]
    assert (
        first == {"type": "text", "text": "Let me see. "}
        and len({call["id"] for call in calls}) == 2
    )
    assert all(call["id"].startswith("toolu_") for call in calls)
    assert [(call["name"], call["input"]) for call in calls] == [("weather", {"city": "Oslo"})] * 2
    streamed = content_of(events)
    assert streamed[0] == first
    assert [(call["name"], json.loads(call["input"])) for call in streamed[1:]] == [
        ("weather", {"city": "Oslo"})
    ] * 2
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [start["input"] for start in starts[1:]] == [{}, {}]
    one, _ = both(
        saying(CALL, CALL),
        HERMES,
        tools=TOOLS,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert len(one["content"]) == 1


def test_ids_of_calls_suit_the_template() -> None:
    forced = {"tools": TOOLS, "tool_choice": {"type": "any"}}
    for config, size in ((MISTRAL, 9), (HERMES, 30)):
        whole, _ = both(saying('[{"name": "clock", "arguments": {}}]'), config, **forced)
        assert len(whole["content"][0]["id"]) == size


def test_a_forced_call_and_a_cut_one() -> None:
    named: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}
    whole, events = both(saying('{"city": ', '"Oslo"}'), HERMES, **named)
    assert whole["content"][0]["input"] == {"city": "Oslo"} and whole["stop_reason"] == "tool_use"
    assert content_of(events)[0]["input"] == '{"city": "Oslo"}'
    whole, events = both(saying('{"city": "O', reason="length"), HERMES, max_tokens=11, **named)
    assert whole["stop_reason"] == events[-2]["delta"]["stop_reason"] == "max_tokens"
    (call,), (streamed,) = whole["content"], content_of(events)
    assert call["input"] == {} and streamed["input"] == '{"city": "O'


@pytest.mark.conforms("messages.output_config", "messages.output_format")
def test_a_format_is_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}

    async def act(found: Talk) -> None:
        for fields in ({"output_config": {"format": form}}, {"output_format": form}):
            await found.post(**fields)
            told = found.link.submitted[-1].params.structured
            assert told is not None and told.kind == "json_schema"
            assert json.loads(told.value) == {**schema, "additionalProperties": False}
        both_forms = await found.post(
            structured_outputs={"regex": "a"}, output_config={"format": form}
        )
        assert (
            both_forms.status_code == 400
            and "output_config.format" in both_forms.json()["error"]["message"]
        )

    talk(act)


def renderer() -> MessagesRenderer:
    class Job:
        id, model, has_short_call_ids = "msg_1", "m", False

    counts = Usage(5, 0, 5, PromptDetails(3))
    return MessagesRenderer(Job(), lambda: counts, "req_1", fills_context=False)  # type: ignore[arg-type]


def test_thinking_comes_back_signed() -> None:
    parts = [Reasoning("Hm"), Reasoning("."), "Yes", ToolCall("clock", "{"), ToolCall(None, "}")]
    stream = renderer()
    text = b"".join([stream.chunk(Piece(0, "", parts=[part]), None) for part in parts])
    text += stream.chunk(Piece(0, "", "tool_calls"), None) + stream.end(Usage(5, 9, 14))
    blocks = content_of(check_stream(text.decode()))
    whole = json.loads(
        renderer().answer([Piece(0, "Yes", "tool_calls", parts=parts)], Usage(5, 9, 14))
    )
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE}
    assert SIGNATURE and blocks[0] == whole["content"][0] == thinking
    assert blocks[1] == whole["content"][1] == {"type": "text", "text": "Yes"}
    assert blocks[2]["input"] == "{}" and whole["content"][2]["input"] == {}


# Shows thinking that comes back, and writes an empty one if thinking is off.
THINKING = """{% for m in messages %}{{ m.role }}: {% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}
{{- m.content }}
{% endfor %}assistant:{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"""


def test_the_thinking_of_a_model_and_its_way_back(tmp_path: Path) -> None:
    path = tmp_path / "thinking.jinja"
    path.write_text(THINKING, encoding="utf-8")
    config = ServerConfig(EngineConfig(model="m"), chat_template=str(path))
    whole, events = both(saying("<think>\nLet me", " see.\n</think>\n\nYes", "."), config)
    thinking = {"type": "thinking", "thinking": "Let me see.", "signature": SIGNATURE}
    assert whole["content"] == content_of(events) == [thinking, {"type": "text", "text": "Yes."}]
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 10
    assert events[-2]["usage"] == whole["usage"]

    async def act(found: Talk) -> None:
        back = [user("?"), {"role": "assistant", "content": whole["content"]}, user("!")]
        assert "<think>Let me see.</think>Yes." in await found.prompt(messages=back)
        off = await found.post(thinking={"type": "disabled"}, messages=back)
        assert bytes(found.link.submitted[-1].prompt_ids).endswith(b"</think>\n\n")
        assert "x-orca-ignored-fields" not in off.headers

    talk(act, config=config)

    async def unread(found: Talk) -> set[str]:
        back = [user("?"), {"role": "assistant", "content": whole["content"]}, user("!")]
        settings: dict[str, Any] = {
            "thinking": {"type": "enabled"},
            "output_config": {"effort": "low"},
        }
        answer = await found.post(COUNT, messages=back, **settings)
        return set(answer.headers["x-orca-ignored-fields"].split(", "))

    assert talk(unread) == {"thinking", "output_config.effort", "messages.content.thinking"}


def test_pings_in_silence_and_the_event_of_a_failure() -> None:
    def script(submit: Submit) -> list[News]:
        return [update(submit, 65), update(submit, finish_reason="error", error="broken")]

    assert renderer().silence() == b'event: ping\ndata: {"type":"ping"}\n\n'
    answer = ask(script, stream=True)
    *_, last = check_stream(answer.text)
    assert last["type"] == "error" and last["error"] == {
        "type": "invalid_request_error",
        "message": "broken",
    }
    assert last["request_id"] == answer.headers["x-request-id"] == answer.headers["request-id"]


def test_a_limit_beyond_the_context() -> None:
    """It is cut to the rest, and the answer names the cut limit."""
    answer = ask(saying("x", reason="length"), max_tokens=32000, messages=[user("x")])
    usage = answer.json()["usage"]
    assert (
        answer.status_code == 200
        and answer.json()["stop_reason"] == "model_context_window_exceeded"
    )
    assert int(answer.headers["x-orca-max-tokens"]) == CONTEXT - usage["input_tokens"]
    exact = ask(
        saying("x", reason="length"),
        max_tokens=CONTEXT - usage["input_tokens"],
        messages=[user("x")],
    )
    assert exact.json()["stop_reason"] == "max_tokens" and "x-orca-max-tokens" not in exact.headers
