"""Tools, calls and answers of chats, shared by the tests of `/v1/chat/completions`."""

from typing import Any

import httpx

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.openai.shapes import check_response
from tests.serve.played import events

HERMES = ServerConfig(EngineConfig(model="m"), tool_call_parser="hermes")
MISTRAL = ServerConfig(EngineConfig(model="m"), tool_call_parser="mistral")

WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "clock"}},
]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'


def checked(answer: httpx.Response) -> httpx.Response:
    """The same, held to OpenAI's shapes."""
    request = answer.request
    check_response(
        request.method,
        request.url.path,
        request.read(),
        answer.status_code,
        dict(answer.headers),
        answer.content,
    )
    return answer


def message_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = checked(answer).json()["choices"][0]["message"]
    return message


def deltas(answer: httpx.Response, choice: int = 0) -> list[dict[str, Any]]:
    chunks = [event for event in events(checked(answer)) if event["choices"]]
    return [
        chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"][0]["index"] == choice
    ]


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = checked(answer).json()["error"]
    return error


def only(*names: str, mode: str = "auto") -> dict[str, Any]:
    """A choice among the tools with these names."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
