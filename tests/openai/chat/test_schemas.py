"""Schemas in formats and tools of all APIs: what a grammar cannot enforce is named, or refused with `strict`."""

from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from tests.openai.chats import HERMES
from tests.serve.played import Stage, on_stage, saying, user

HEADER = "x-orca-ignored-fields"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}},
    "required": ["tags"],
    "not": {"required": ["a"]},
    "unit": "m",
}
LEFT_OUT = ("properties.tags.uniqueItems", "not", "unit")


def formats(
    strict: bool | None, schema: Mapping[str, Any] = SCHEMA
) -> list[tuple[str, dict[str, Any], str]]:
    """For each API: its path, the fields with a format, and the path of the schema."""
    named = {"name": "s", "schema": schema} | ({} if strict is None else {"strict": strict})
    response_format = {"type": "json_schema", "json_schema": named}
    in_a_chat = "response_format.json_schema.schema"
    found: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {"response_format": response_format}, in_a_chat),
        ("/v1/completions", {"response_format": response_format}, in_a_chat),
        (RESPONSES, {"text": {"format": {"type": "json_schema", **named}}}, "text.format.schema"),
    ]
    if strict is None:
        output = {"format": {"type": "json_schema", "schema": schema}}
        found += [
            (MESSAGES, {"output_config": output}, "output_config.format.schema"),
            (
                CHAT,
                {"response_format": {"type": "json_object", "schema": schema}},
                "response_format.schema",
            ),
            (
                RESPONSES,
                {"text": {"format": {"type": "json_object", "schema": schema}}},
                "text.format.schema",
            ),
        ]
    return found


def tools(strict: bool, *, is_forced: bool = True) -> list[tuple[str, dict[str, Any], str]]:
    """For each API: its path, the fields with a tool, and the path of its schema."""
    function = {"name": "f", "parameters": SCHEMA, "strict": strict}
    chat = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    flat = {"tools": [{"type": "function", **function}], "tool_choice": "required"}
    other = {
        "tools": [{"name": "f", "input_schema": SCHEMA, "strict": strict}],
        "tool_choice": {"type": "any"},
    }
    found = [
        (CHAT, chat, "tools.function.parameters"),
        (RESPONSES, flat, "tools.parameters"),
        (MESSAGES, other, "tools.input_schema"),
    ]
    return (
        found
        if is_forced
        else [(path, {"tools": fields["tools"]}, where) for path, fields, where in found]
    )


def body_of(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"prompt": "x"}
    if path == RESPONSES:
        own = {"input": "x"}
    elif path != "/v1/completions":
        own = {"messages": [user("x")], "max_tokens": 50}
    return {"model": "m", **own, **fields}


def answers(
    calls: list[tuple[str, dict[str, Any], str]], text: str = '{"tags":[]}'
) -> tuple[list[httpx.Response], str]:
    """The answers, and the metrics after them."""

    async def act(stage: Stage) -> tuple[list[httpx.Response], str]:
        async with stage.http() as http:
            found = [await http.post(path, json=body_of(path, fields)) for path, fields, _ in calls]
        return found, stage.observer.render().decode()

    return on_stage(saying(text), act, HERMES, chats=True)


def named(answer: httpx.Response) -> set[str]:
    assert answer.status_code == 200, answer.text
    return set(answer.headers.get(HEADER, "").split(", "))


@pytest.mark.conforms(
    "chat.response_format",
    "completions.response_format",
    "responses.text",
    "messages.output_config",
)
def test_what_a_format_leaves_out_is_named() -> None:
    calls = [*formats(None), *formats(False)]
    found, metrics = answers(calls)
    for (path, _, where), answer in zip(calls, found, strict=True):
        assert named(answer) == {f"{where}.{one}" for one in LEFT_OUT}, path
    assert f'orca_jax_ignored_fields_total{{field="other"}} {len(calls)}' in metrics, (
        "names of callers are no labels"
    )
    assert "uniqueItems" not in metrics


def message_of(answer: httpx.Response) -> str:
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def test_a_strict_format_is_enforced_or_refused() -> None:
    calls = formats(True)
    for (path, _, where), answer in zip(calls, answers(calls)[0], strict=True):
        assert message_of(answer).startswith(
            f"{where} cannot be used: properties.tags.uniqueItems: "
        ), path
        assert "set strict to false" in message_of(answer)
    schema = {key: value for key, value in SCHEMA.items() if key not in ("not", "properties")}
    for answer in answers(formats(True, schema))[0]:
        assert {one.rpartition(".")[2] for one in named(answer)} == {"unit"}, "an annotation"


@pytest.mark.conforms("chat.tools", "responses.tools", "messages.tools")
def test_what_a_forced_call_leaves_out_is_named() -> None:
    calls = tools(False)
    found, _ = answers(calls, '[{"name":"f","arguments":{"tags":[]}}]')
    for (path, _, where), answer in zip(calls, found, strict=True):
        assert named(answer) == {f"{where}.{one}" for one in LEFT_OUT}, path
    for answer in answers(tools(False, is_forced=False), "x")[0]:
        assert named(answer) == {""}, "arguments of free calls are not enforced"


@pytest.mark.parametrize("is_forced", [True, False])
def test_a_strict_tool_is_enforced_or_refused(is_forced: bool) -> None:
    calls = tools(True, is_forced=is_forced)
    for (path, _, where), answer in zip(calls, answers(calls)[0], strict=True):
        own = where.removeprefix("tools.")
        assert f"tools.f: {own} cannot be used: properties.tags.uniqueItems: " in message_of(
            answer
        ), path


@pytest.mark.conforms("chat.structured_outputs")
def test_structured_outputs_are_enforced_or_refused() -> None:
    fields = {"structured_outputs": {"json": SCHEMA}}
    for answer in answers(
        [(path, fields, "") for path in (CHAT, RESPONSES, MESSAGES, "/v1/completions")]
    )[0]:
        assert "structured_outputs.json cannot be used: properties.tags.uniqueItems" in message_of(
            answer
        )
    text = {"structured_outputs": {"json": '{"type": "string", "format": "color"}'}}
    (answer,) = answers([(CHAT, text, "")])[0]
    assert named(answer) == {"structured_outputs.json.format"}


def test_counts_of_tokens_refuse_what_calls_refuse() -> None:
    calls = [
        (f"{MESSAGES}/count_tokens", {"max_tokens": 0}),
        (f"{RESPONSES}/input_tokens", {"max_output_tokens": 0}),
    ]
    bodies = [body_of(RESPONSES if "responses" in path else path, fields) for path, fields in calls]

    async def act(stage: Stage) -> list[httpx.Response]:
        async with stage.http() as http:
            return [
                await http.post(path, json=body)
                for (path, _), body in zip(calls, bodies, strict=True)
            ]

    for (_, fields), answer in zip(calls, on_stage(saying("x"), act, chats=True), strict=True):
        assert f"{next(iter(fields))} must be at least 1" in message_of(answer)


def test_a_schema_may_have_a_megabyte() -> None:
    for size, status in ((2**20 - 200, 200), (2**20, 400)):
        schema = {"type": "object", "properties": {"a": {"const": "x"}}, "description": "d" * size}
        (answer,) = answers(
            [(CHAT, {"response_format": {"type": "json_object", "schema": schema}}, "")]
        )[0]
        assert answer.status_code == status, answer.text


def test_schemas_of_many_sources_in_one_call() -> None:
    """Long paths are cut in the header, and there are few of them."""
    schema = {
        "properties": {f"{number} ä" + "x" * 200: {"uniqueItems": True} for number in range(40)}
    }
    (answer,) = answers(
        [(CHAT, {"response_format": {"type": "json_object", "schema": schema}}, "")]
    )[0]
    names = answer.headers[HEADER].split(", ")
    assert len(names) == 33 and names[-1] == "..." and max(map(len, names)) == 128
