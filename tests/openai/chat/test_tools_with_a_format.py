"""Calls that are not forced, beside a format and with strict arguments: the grammar allows both, or enforces them."""

from typing import Any

import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import StructuredOutput
from tests.openai.chats import CALL, HERMES, TOOLS, error_of, message_of
from tests.serve.played import PlayedLink, chat, saying
from tests.serve.running import MODEL, Server
from tests.text.accepting import accepts

FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "s", "schema": {"properties": {"x": {"type": "integer"}}}},
}
CHAT = "/v1/chat/completions"
COMPACT = CALL.replace(": ", ":").replace(", ", ",")
WRONG = COMPACT.replace("Oslo", "Bonn")
STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]


def constraint(link: PlayedLink) -> StructuredOutput:
    structured = link.submitted[0].params.structured
    assert structured is not None
    return structured


def fits(link: PlayedLink, text: str) -> bool:
    return accepts(constraint(link), text, ByteTokenizer())


@pytest.mark.conforms("chat.response_format", "chat.tools", "chat.structured_outputs")
@pytest.mark.parametrize(
    "fields", [{"response_format": FORMAT}, {"structured_outputs": {"json": {"type": "object"}}}]
)
def test_an_answer_is_a_call_or_in_the_format(fields: dict[str, Any]) -> None:
    answer, link = chat(saying('{"x":1}'), HERMES, tools=TOOLS, **fields)
    assert message_of(answer)["content"] == '{"x":1}' and "tool_calls" not in message_of(answer)
    assert (
        fits(link, '{"x":1}')
        and fits(link, COMPACT)
        and fits(link, COMPACT * 2)
        and not fits(link, "Well.")
    )
    assert fits(link, WRONG), "only strict arguments are enforced"
    answer, link = chat(saying(COMPACT), HERMES, tools=TOOLS, parallel_tool_calls=False, **fields)
    assert message_of(answer)["content"] is None
    assert message_of(answer)["tool_calls"][0]["function"]["arguments"] == '{"city":"Oslo"}'
    assert fits(link, COMPACT) and not fits(link, COMPACT * 2)


@pytest.mark.conforms("chat.tools", "chat.tool_choice")
def test_strict_arguments_are_enforced_after_the_marker() -> None:
    for fields, text in (({}, "Well."), ({"response_format": FORMAT}, '{"x":1}')):
        _, link = chat(saying("x"), HERMES, tools=STRICT, **fields)
        assert fits(link, text) and fits(link, COMPACT) and not fits(link, WRONG)
        assert fits(link, '<tool_call>{"name":"clock","arguments":{"any":1}}</tool_call>')
    _, link = chat(saying("x"), HERMES, tools=TOOLS)
    assert link.submitted[0].params.structured is None, "free text has no constraint"


def test_what_cannot_be_enforced_is_named() -> None:
    config = ServerConfig(EngineConfig(model="m"), tool_call_parser="qwen3_coder")
    function = {
        "name": "f",
        "strict": True,
        "parameters": {"properties": {"a": {"type": "string", "pattern": "a+"}}},
    }
    tools = [{"type": "function", "function": function}]
    for fields, kind in (({}, None), ({"response_format": FORMAT}, "composed")):
        answer, link = chat(saying("x"), config, tools=tools, **fields)
        assert answer.headers["x-orca-ignored-fields"] == "tools.function.strict"
        structured = link.submitted[0].params.structured
        assert (None if structured is None else structured.kind) == kind


@pytest.mark.conforms("chat.response_format", "chat.tool_choice")
def test_a_forced_call_has_no_text_for_a_format() -> None:
    text = '[{"name":"clock","arguments":{}}]'
    answer, link = chat(
        saying(text), HERMES, tools=TOOLS, tool_choice="required", response_format=FORMAT
    )
    assert message_of(answer)["tool_calls"] and constraint(link).kind == "json_schema"
    outputs = {"regex": "a"}
    refused, _ = chat(
        saying(text), HERMES, tools=TOOLS, tool_choice="required", structured_outputs=outputs
    )
    assert error_of(refused)["param"] == "structured_outputs"


def test_both_are_generated_by_an_engine(server: Server) -> None:
    """The first token decides: "<" begins a call, and a quote the format."""
    constant = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": "k"}}}
    clock = {"type": "function", "function": {"name": "clock", "strict": True}}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "?"}],
        "tools": [clock],
        "max_tokens": 200,
    }
    body |= {"response_format": constant, "parallel_tool_calls": False}
    for first in '<"':
        answer = server.http.post(CHAT, json={**body, "logit_bias": {str(ord(first)): 100}})
        message = message_of(answer)
        if first == "<":
            assert message["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
        assert message["content"] == (None if first == "<" else '"k"')
