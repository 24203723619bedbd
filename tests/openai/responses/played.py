"""A client of OpenAI over a scripted engine, and a strict reading of responses and events by the client's own types."""

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx2
import openai
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import BaseModel, TypeAdapter

from orca_jax.server_config import ServerConfig
from tests.openai.chats import WEATHER
from tests.serve.played import Script, Stage, on_stage, saying

_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OF_VLLM = ("input_messages", "output_messages")
OF_OPEN_RESPONSES = ("store", "presence_penalty", "frequency_penalty")
"""Fields that the specification of Open Responses requires, and that OpenAI's client does not know."""
FUNCTION: dict[str, Any] = {"type": "function", **WEATHER, "strict": True}


def strictly(value: BaseModel | list[Any] | dict[str, Any] | Any, where: str = "$") -> None:
    """Raise AssertionError for a key outside of the type of its object."""
    if isinstance(value, BaseModel):
        others = OF_OPEN_RESPONSES if isinstance(value, Response) else ()
        extra = (value.model_extra or {}).keys() - set(others)
        assert not extra, f"{where}: {type(value).__name__} has no {sorted(extra)}"
        for name in value.model_fields_set:
            strictly(getattr(value, name), f"{where}.{name}")
    elif isinstance(value, list):
        for index, one in enumerate(value):
            strictly(one, f"{where}[{index}]")


def checked_response(answer: dict[str, Any]) -> Response:
    """The whole response, held to the client's type, beside vLLM's keys, which a field of vLLM asks for."""
    response = Response.model_validate(
        {name: value for name, value in answer.items() if name not in OF_VLLM}
    )
    strictly(response)
    return response


def check_answer(method: str, path: str, request: dict[str, Any], body: bytes) -> None:
    """A whole answer of a route of responses, held to the client's types. Raises AssertionError."""
    if path == "/v1/responses" and request.get("stream"):
        events_of(body.decode())
        return
    answer = json.loads(body)
    if path.endswith("/input_tokens"):
        strictly(InputTokenCountResponse.model_validate(answer))
    elif path.endswith("/input_items"):
        strictly(ResponseItemList.model_validate(answer))
    elif method == "DELETE":
        assert answer == {"id": path.rpartition("/")[2], "object": "response", "deleted": True}
    else:
        checked_response(answer)


def checked_event(event: dict[str, Any]) -> Any:
    """An event, held to the client's type.

    Outside of it are the code of a prompt that is too long, and the name at the end of a call's arguments: versions 1
    and 2 of the client require it, version 3 does not know it.
    """
    plain = json.loads(json.dumps(event).replace('"context_length_exceeded"', '"invalid_prompt"'))
    if event["type"] == "response.function_call_arguments.done":
        assert isinstance(plain.pop("name"), str)
    found = _EVENTS.validate_python(plain)
    assert isinstance(found, BaseModel)
    strictly(found, event["type"])
    return found


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, held to their types, numbers and order."""
    found = [json.loads(data) for kind, data in _framed(text)]
    assert [kind for kind, _ in _framed(text)] == [event["type"] for event in found]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    for event in found:
        checked_event(event)
    assert [event["type"] for event in found[:2]] in (
        ["response.created", "response.in_progress"],
        ["response.created", "response.failed"],
    )
    assert found[-1]["type"] in ("response.completed", "response.incomplete", "response.failed")
    _check_items(found)
    return found


def _framed(text: str) -> Iterator[tuple[str, str]]:
    assert text.endswith("\n\n")
    for part in text.removesuffix("\n\n").split("\n\n"):
        if not part.startswith(":"):
            kind, data = part.split("\n")
            yield kind.removeprefix("event: "), data.removeprefix("data: ")


def _check_items(found: list[dict[str, Any]]) -> None:
    """The deltas of each item make its text, and its events are between its begin and its end."""
    texts: dict[str, str] = {}
    summaries: dict[str, str] = {}
    last = found[-1]["response"]
    for event in found:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(texts), "items begin in order"
            texts[event["item"]["id"]] = ""
        elif kind == "reasoning_summary_text.delta":
            summaries[event["item_id"]] = summaries.get(event["item_id"], "") + event["delta"]
        elif kind == "reasoning_summary_text.done":
            assert event["text"] == summaries[event["item_id"]] == texts[event["item_id"]]
        elif kind.endswith(".delta"):
            assert list(texts).index(event["item_id"]) == event["output_index"] == len(texts) - 1
            texts[event["item_id"]] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event["text"] == texts[event["item_id"]]
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == texts[event["item_id"]]
            assert (
                event["name"] == last["output"][event["output_index"]]["name"]
                or last["status"] == "failed"
            )
        elif kind == "output_item.done":
            assert (
                last["status"] == "failed" or event["item"] == last["output"][event["output_index"]]
            )
    if last["status"] != "failed":
        assert list(texts) == [item["id"] for item in last["output"]]


def with_client[T](
    script: Script,
    act: Callable[[openai.AsyncOpenAI, Stage], Awaitable[T]],
    config: ServerConfig | None = None,
) -> T:
    """Run `act` with OpenAI's client of a new stage."""

    async def run(stage: Stage) -> T:
        transport = httpx2.ASGITransport(stage.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await act(client_of(http), stage)

    return on_stage(script, run, config, chats=True)


def client_of(http: httpx2.AsyncClient, key: str = "x") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key=key, http_client=http, max_retries=0
    )


def respond(
    script: Script | str, config: ServerConfig | None = None, **fields: Any
) -> tuple[Any, Any]:
    """The HTTP answer to one call, and the link with the messages to the engine."""

    async def act(stage: Stage) -> tuple[Any, Any]:
        async with stage.http() as http:
            return await http.post(
                "/v1/responses", json={"model": "m", "input": "x", **fields}
            ), stage.link

    return on_stage(saying(script) if isinstance(script, str) else script, act, config, chats=True)


def prompt_of(link: Any, index: int = -1) -> str:
    """The prompt that the engine got; the tokens of the tests are bytes."""
    return bytes(link.submitted[index].prompt_ids).decode()
