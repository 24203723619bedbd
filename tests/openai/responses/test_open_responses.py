"""The cases of the compliance tests of Open Responses, but for images: each response by the fields it must have."""

import json
from typing import Any, Literal

import httpx
import msgspec
import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.openai.chats import CALL
from tests.openai.responses.played import FUNCTION, prompt_of, respond
from tests.serve.played import Stage, on_stage, saying

type Maybe[T] = T | None


class Details(msgspec.Struct):
    reasoning_tokens: int


class Cached(msgspec.Struct):
    cached_tokens: int


class Counts(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: Cached
    output_tokens_details: Details


class OpenResponse(msgspec.Struct):
    """The fields that the specification of 2026-04-24 requires. None may be missing; a null is allowed by name."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: Maybe[int]
    status: str
    incomplete_details: Maybe[dict[str, Any]]
    model: str
    previous_response_id: Maybe[str]
    instructions: Maybe[str]
    output: list[dict[str, Any]]
    error: Maybe[dict[str, Any]]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    truncation: Literal["auto", "disabled"]
    parallel_tool_calls: bool
    text: dict[str, Any]
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    temperature: float
    reasoning: Maybe[dict[str, Any]]
    usage: Maybe[Counts]
    max_output_tokens: Maybe[int]
    max_tool_calls: Maybe[int]
    store: bool
    background: bool
    service_tier: str
    metadata: dict[str, str]
    safety_identifier: Maybe[str]
    prompt_cache_key: Maybe[str]


def held(answer: Any, status: str = "completed") -> OpenResponse:
    """A response held to the specification: every field is there, of its type."""
    found = msgspec.convert(answer, OpenResponse)
    assert (found.status, found.completed_at is not None) == (status, status == "completed")
    assert found.output or status == "in_progress"
    return found


def user(content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": content}


CASES: dict[str, dict[str, Any]] = {
    "basic-response": {"input": [user("Say hello.")]},
    "system-prompt": {
        "input": [{"type": "message", "role": "system", "content": "Be short."}, user("Say hello.")]
    },
    "multi-turn": {
        "input": [
            user("My name is Alice."),
            {"type": "message", "role": "assistant", "content": "Hello Alice!"},
            user("What is my name?"),
        ]
    },
    "tool-calling": {"input": [user("The weather?")], "tools": [FUNCTION]},
}


@pytest.mark.conforms("POST /v1/responses")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_each_case_has_all_fields(name: str, stream: bool) -> None:
    has_tools = name == "tool-calling"
    answer, _ = respond(saying(CALL if has_tools else "Hello."), stream=stream, **CASES[name])
    assert answer.status_code == 200, answer.text
    if not stream:
        found = held(answer.json())
    else:
        lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line.removeprefix("data: ")) for line in lines]
        for event in events[:2]:
            held(event["response"], "in_progress")
        found = held(events[-1]["response"])
    assert found.output[0]["type"] == ("function_call" if has_tools else "message")
    assert found.service_tier == "default"


@pytest.mark.conforms("responses.tool_choice", "responses.input")
def test_a_call_goes_to_its_function_and_back() -> None:
    choice = {"type": "function", "name": "weather"}
    first, _ = respond('{"city": "Oslo"}', tools=[FUNCTION], tool_choice=choice)
    (call,) = held(first.json()).output
    assert (call["type"], call["name"]) == ("function_call", "weather")
    result = {
        "type": "function_call_output",
        "call_id": call["call_id"],
        "output": '{"temperature": 20}',
    }
    again, link = respond(
        "It is 20 degrees.", tools=[FUNCTION], input=[user("The weather?"), call, result]
    )
    held(again.json())
    assert '{"temperature": 20}' in prompt_of(link)


@pytest.mark.conforms("responses.previous_response_id", "responses.store")
def test_a_response_is_continued_by_its_id() -> None:
    async def act(stage: Stage) -> None:
        async def send(http: httpx.AsyncClient, **fields: Any) -> Any:
            return (await http.post("/v1/responses", json={"model": "m", **fields})).json()

        async with stage.http() as http:
            first = held(await send(http, input="Remember: papaya."))
            second = held(await send(http, input="Which word?", previous_response_id=first.id))
            assert first.store and second.previous_response_id == first.id
            assert "papaya" in prompt_of(stage.link)
            assert not held(await send(http, input="x", store=False)).store

    on_stage(saying("OK."), act, chats=True)


def test_a_server_that_stores_nothing_says_so() -> None:
    config = ServerConfig(EngineConfig(model="m"), responses_store=0)
    answer, _ = respond("x", config)
    assert not held(answer.json()).store


@pytest.mark.conforms(
    "responses.max_tool_calls", "responses.safety_identifier", "responses.prompt_cache_key"
)
def test_settings_are_repeated_in_the_response() -> None:
    fields: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.25,
        "max_tool_calls": 3,
        "safety_identifier": "s",
        "prompt_cache_key": "k",
    }
    answer, _ = respond("x", **fields)
    assert {name: answer.json()[name] for name in fields} == fields
    named = "max_tool_calls, safety_identifier, prompt_cache_key"
    assert answer.headers["x-orca-ignored-fields"] == named, "they have no other effect"
    plain, _ = respond("x")
    assert (plain.json()["presence_penalty"], plain.json()["prompt_cache_key"]) == (0.0, None)


def test_a_cut_response_is_not_complete() -> None:
    answer, _ = respond(saying("hel", reason="length"))
    held(answer.json(), "incomplete")


@pytest.mark.parametrize("kind", ["input_image", "input_file"])
def test_images_and_files_of_the_user_are_refused_by_name(kind: str) -> None:
    answer, link = respond("x", input=[user([{"type": "input_text", "text": "?"}, {"type": kind}])])
    assert (answer.status_code, answer.json()["error"]["param"]) == (
        400,
        "input[0].content[1].type",
    )
    assert not link.submitted
