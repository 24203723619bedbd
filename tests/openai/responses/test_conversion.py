"""Items of `/v1/responses` as messages of a chat, and tools with namespaces."""

import json
from typing import Any

import pytest

from orca_jax.serve.openai.asked import Asked, TemplatePrompt
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.model import Model
from orca_jax.serve.openai.responses.api import messages_of, tools_of, understood
from orca_jax.serve.openai.responses.store import ResponseStore, items_of
from orca_jax.serve.openai.schema import responses_parser
from orca_jax.serve.openai.schema.input_items import InputMessage
from orca_jax.serve.openai.schema.responses import InputItem, ResponsesRequest
from orca_jax.serve.openai.schema.structured import JsonSchemaFormat
from orca_jax.serve.openai.schema.tolerant import Ignored
from orca_jax.text.tokenizer import load_tokenizer
from orca_jax.text.tools import tool_name

FUNCTION = {"type": "function", "name": "f"}


def parsed(**fields: Any) -> tuple[ResponsesRequest, Ignored]:
    return responses_parser.parse(json.dumps({"model": "m", **fields}).encode())


def messages(*items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    call, _ = parsed(input=list(items), instructions=instructions)
    return messages_of(call.instructions, own_items(call))


def own_items(call: ResponsesRequest) -> list[InputItem]:
    return items_of(ResponseStore(0), None, call)


def asked(**fields: Any) -> Asked:
    call, _ = parsed(**fields)
    model = Model(load_tokenizer("byte"), None, {}, 257, 2048, 7 * 1024, 1024)
    return understood(call, own_items(call), tools_of(call), model, "resp_1", ())


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(**fields)
    return caught.value


@pytest.mark.conforms("responses.input", "responses.instructions")
def test_messages_with_and_without_type() -> None:
    found = messages(
        {"role": "developer", "content": "short"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "type": "message",
            "phase": "final_answer",
            "content": [
                {"type": "output_text", "text": "c", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "d"},
            ],
        },
        {"role": "system", "content": "late"},
        {"role": "user", "content": "e"},
        instructions="be",
    )
    expected = ["system be", "system short", "user a\nb", "assistant c\nd", "system late", "user e"]
    assert [f"{message['role']} {message['content']}" for message in found] == expected
    assert messages() == []


@pytest.mark.conforms("responses.input")
def test_items_of_one_turn_become_one_message() -> None:
    calls = [
        {
            "type": "function_call",
            "call_id": f"c{i}",
            "name": "f",
            "arguments": "{}",
            "id": f"fc_{i}",
        }
        for i in (1, 2)
    ]
    found = messages(
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "let me see"},
        calls[0],
        {**calls[1], "namespace": "ns"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "sum"}],
         "encrypted_content": None},
    )  # fmt: skip
    assert [message["role"] for message in found] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    turn = found[1]
    assert turn["content"] == "let me see" and turn["reasoning"] == "hm"
    assert [(call["id"], call["function"]["name"]) for call in turn["tool_calls"]] == [
        ("c1", "f"),
        ("c2", "ns__f"),
    ]
    assert [(one["tool_call_id"], one["content"]) for one in found[2:4]] == [
        ("c1", "one"),
        ("c2", "two"),
    ]
    assert found[4]["reasoning"] == "sum"


@pytest.mark.conforms("responses.input", "responses.without effect")
def test_items_of_other_types_are_left_out_and_named() -> None:
    call, ignored = parsed(
        input=[
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"role": "user", "content": "x", "phase": "commentary"},
            {"type": "compaction", "encrypted_content": "abc"},
        ],
        client_metadata={"a": "b"},
        background_options={"a": "b"},
    )
    (item,) = own_items(call)
    assert isinstance(item, InputMessage) and item.role == "user"
    assert ignored.unknown == ("input.web_search_call", "input.compaction")
    assert set(ignored.known) == {"input.phase", "client_metadata", "background_options"}


IMAGE = {"type": "input_image", "image_url": "x"}
FILE = {"type": "input_file", "file_id": "x"}
NO_FUNCTION = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input[0].content[0].type", "images"),
        ({"input": [{"role": "user", "content": [FILE]}]}, "input[0].content[0].type", "files"),
        ({"input": "x", "background": True}, "background", "own call"),
        ({"input": "x", "conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"input": "x", "prompt": {"id": "p"}}, "prompt", "instructions"),
        ({"input": "x", "response_format": {"type": "text"}}, "response_format", "text.format"),
        ({"input": [{"role": "user"}]}, "input[0].content", "required"),
        ({"input": [{"id": "", "type": {}}]}, "input[0].type", "str"),
        (
            {"input": [{"role": "user", "content": [{"type": []}]}]},
            "input[0].content[0].type",
            "text",
        ),
        (
            {"input": "x", "tools": [FUNCTION], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            "web_search",
        ),
        (
            {"input": "x", "tools": [FUNCTION], "tool_choice": NO_FUNCTION},
            "tool_choice.tools",
            "function",
        ),
        ({"input": "x", "tools": [FUNCTION, FUNCTION]}, "tools", "twice"),
        ({"input": "x", "strange": 1}, "strange", "unknown"),
    ],
)
@pytest.mark.conforms("responses.input", "responses.tools", "responses.tool_choice")
def test_refused_by_name(fields: dict[str, Any], param: str, word: str) -> None:
    error = refused(**fields)
    assert (error.status, error.param) == (400, param) and word in error.message


@pytest.mark.conforms("responses.tools", "responses.tool_choice")
def test_namespaces_and_tools_of_other_types() -> None:
    inside = [{**FUNCTION, "strict": False}, {"type": "custom", "name": "c"}]
    namespace = {"type": "namespace", "name": "crm", "description": "d", "tools": inside}
    tools = [FUNCTION, namespace, {"type": "web_search"}]
    choice = {"type": "function", "name": "crm__f"}
    call, ignored = parsed(input="x", tools=tools, tool_choice=choice)
    found = tools_of(call)
    assert [tool_name(tool) for tool in found.listed] == ["f", "crm__f"]
    assert found.names["crm__f"] == ("f", "crm") and found.names["f"] == ("f", None)
    assert ignored.unknown == ("tools.web_search", "tools.tools.custom")
    named = {"type": "function", "function": {"name": "crm__f"}}
    assert asked(input="x", tools=tools, tool_choice=choice).tools.choice == named
    only_there = [namespace, {"type": "function", "name": "g"}]
    choice = {"type": "function", "name": "f"}
    assert asked(input="x", tools=only_there, tool_choice=choice).tools.choice == named, (
        "its short name is enough"
    )
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "g"}, {"type": "mcp"}],
    }
    only = asked(input="x", tools=only_there, tool_choice=allowed).tools
    assert only.choice == "required" and [tool_name(tool) for tool in only.listed] == ["g"]


@pytest.mark.conforms(
    "responses.text", "responses.reasoning", "responses.include", "responses.top_logprobs"
)
@pytest.mark.conforms("responses.max_output_tokens", "responses.parallel_tool_calls")
def test_fields_are_understood() -> None:
    format_ = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    found = asked(
        input="x",
        text={"format": format_, "verbosity": "low"},
        reasoning={"effort": "low", "summary": "auto"},
        include=["message.output_text.logprobs"],
        top_logprobs=3,
        max_output_tokens=7,
        parallel_tool_calls=False,
        temperature=0.5,
        top_k=4,
        seed=5,
        cache_salt="s",
        stop=["a"],
    )
    assert isinstance(found.form, JsonSchemaFormat) and found.form.json_schema.strict is True
    assert isinstance(found.prompt, TemplatePrompt) and found.prompt.hints == {
        "reasoning_effort": "low"
    }
    assert (found.logprobs, found.limits.answer, found.stops) == (3, 7, ["a"])
    shared = found.fields
    assert (shared.temperature, shared.top_k, shared.seed, shared.cache_salt) == (0.5, 4, 5, "s")
    assert not found.tools.are_parallel
    assert asked(input="x", top_logprobs=3).logprobs is None
