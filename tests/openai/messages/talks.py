"""Calls of `/v1/messages` on a played engine."""

from collections.abc import Callable, Mapping
from typing import Any

import httpx

from orca_jax.server_config import ServerConfig
from tests.openai.chats import TOOLS as CHAT_TOOLS
from tests.openai.messages.sdk_shapes import check_messages_response, check_stream
from tests.serve.played import PlayedLink, Script, Stage, on_stage, saying, user

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TOOLS: list[dict[str, Any]] = [
    {
        "name": tool["function"]["name"],
        "input_schema": tool["function"].get("parameters", {"type": "object"}),
        **{key: text for key, text in tool["function"].items() if key == "description"},
    }
    for tool in CHAT_TOOLS
]


class Talk:
    """A server whose template and engine are used by several calls."""

    def __init__(self, stage: Stage, http: httpx.AsyncClient) -> None:
        self.stage = stage
        self.http = http

    @property
    def link(self) -> PlayedLink:
        return self.stage.link

    async def post(
        self, path: str = MESSAGES, *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """The answer to one call, held to the SDK's shapes."""
        body = {"model": "m", "messages": [user("x")], **fields}
        if path == MESSAGES:
            body.setdefault("max_tokens", 100)
        answer = await self.http.post(path, json=body, headers=headers)
        check_messages_response(
            path.partition("?")[0],
            body,
            answer.status_code,
            answer.headers,
            answer.content,
            complete=True,
        )
        return answer

    async def prompt(self, **fields: Any) -> str:
        """The prompt of a call, as the engine gets it."""
        answer = await self.post(**fields)
        assert answer.status_code == 200, answer.text
        return bytes(self.link.submitted[-1].prompt_ids).decode()

    async def chat_prompt(self, **fields: Any) -> str:
        """The prompt of a chat."""
        answer = await self.http.post("/v1/chat/completions", json={"model": "m", **fields})
        assert answer.status_code == 200, answer.text
        return bytes(self.link.submitted[-1].prompt_ids).decode()


def talk[T](
    act: Callable[[Talk], Any],
    script: Script | None = None,
    config: ServerConfig | None = None,
    *,
    chats: bool = True,
) -> Any:
    """Run `act` on a new server."""

    async def run(stage: Stage) -> Any:
        async with stage.http() as http:
            return await act(Talk(stage, http))

    return on_stage(script or saying("Fine."), run, config, chats=chats)


def ask(script: Script, config: ServerConfig | None = None, **fields: Any) -> httpx.Response:
    """The answer to one call."""

    async def act(found: Talk) -> httpx.Response:
        return await found.post(**fields)

    answer: httpx.Response = talk(act, script, config)
    return answer


def both(
    script: Script, config: ServerConfig | None = None, **fields: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the events of the same call as a stream."""

    async def act(found: Talk) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        whole = await found.post(**fields)
        assert whole.status_code == 200, whole.text
        stream = await found.post(stream=True, **fields)
        assert stream.status_code == 200, stream.text
        return whole.json(), check_stream(stream.text)

    found: tuple[dict[str, Any], list[dict[str, Any]]] = talk(act, script, config)
    return found
