"""Errors, keys and models in Anthropic's shape, and `HEAD /`."""

from typing import Any

import anthropic.types
import httpx
import pytest

from orca_jax.link.errors import Overloaded
from orca_jax.link.wire import Rejected, Submit
from orca_jax.serve.openai.model import Service
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.openai.messages.sdk_shapes import check_failure, check_models, check_type
from tests.openai.messages.talks import COUNT, MESSAGES, Talk, ask, talk
from tests.serve.played import CONTEXT, News, Stage, on_stage, saying, user

VERSION = {"anthropic-version": "2023-06-01"}
KEYED = ServerConfig(EngineConfig(model="m"), api_key=("k1",), playground=False)


def silent(submit: Submit) -> list[News]:
    return []


def failed(answer: httpx.Response, status: int) -> dict[str, str]:
    assert answer.status_code == status, answer.text
    return check_failure(status, answer.headers, answer.content)


def test_a_prompt_that_is_too_long() -> None:
    async def act(found: Talk) -> None:
        for stream in (False, True):
            answer = await found.post(messages=[user("x" * CONTEXT)], stream=stream)
            length = (await found.post(COUNT, messages=[user("x" * CONTEXT)])).json()[
                "input_tokens"
            ]
            message = f"prompt is too long: {length} tokens > {CONTEXT - 1} maximum"
            assert failed(answer, 400) == {"type": "invalid_request_error", "message": message}
        for path in (MESSAGES, COUNT):  # of a text that is not encoded
            found_long = failed(await found.post(path, messages=[user("x" * CONTEXT * 8)]), 400)[
                "message"
            ]
            assert (
                found_long.startswith("prompt is too long: 1")
                and f" tokens > {CONTEXT - 1} maximum" in found_long
            )

    talk(act)


@pytest.mark.parametrize("path", [MESSAGES, COUNT, f"{MESSAGES}?beta=true"])
def test_access(path: str) -> None:
    async def act(stage: Stage) -> None:
        body = {"messages": [user("x")], "max_tokens": 5}
        async with stage.http() as http:
            for headers in ({}, {"x-api-key": "k2"}, {"authorization": "Basic x"}):
                answer = await http.post(path, json=body, headers=headers)
                assert "key" in failed(answer, 401)["message"].lower() or "Bearer" in answer.text
                assert answer.headers["www-authenticate"] == "Bearer"
            for headers in ({"x-api-key": "k1"}, {"authorization": "Bearer k1"}):
                assert (await http.post(path, json=body, headers=headers)).status_code == 200
            assert failed(await http.get("/v1/models", headers=VERSION), 401)
            assert (await http.get("/v1/models")).json()["error"]["code"] == "invalid_api_key"

    on_stage(saying("x"), act, KEYED, chats=True)


def test_routing_and_bodies() -> None:
    async def act(stage: Stage) -> None:
        async with stage.http() as http:
            failed(await http.get(MESSAGES), 405)
            failed(await http.post(f"{MESSAGES}/batches", json={}), 404)
            failed(await http.get(f"{MESSAGES}/", headers={"host": "evil.example"}), 403)
            failed(
                await http.post(MESSAGES, content=b"{}", headers={"content-type": "text/plain"}),
                415,
            )
            failed(await http.post(MESSAGES, json={"messages": "x" * 2000}), 413)
            assert (
                "not valid JSON"
                in failed(await http.post(MESSAGES, content=b"{", headers=JSON), 400)["message"]
            )
            unknown = failed(
                await http.post(MESSAGES, json={"model": "gpt", "messages": [user("x")]}), 404
            )
            assert "'gpt'" in unknown["message"]
            other = await http.post("/v1/messagesx", json={})
            assert other.status_code == 404 and other.json()["error"].keys() == {
                "message",
                "type",
                "param",
                "code",
            }

    on_stage(saying("x"), act, ServerConfig(EngineConfig(model="m"), max_body_bytes=1000))


JSON = {"content-type": "application/json"}


def test_a_full_queue() -> None:
    async def act(stage: Stage) -> None:
        async with stage.http() as http:
            body = {"messages": [user("x")], "max_tokens": 5}
            failed(await http.post(MESSAGES, json={**body, "queue_timeout": 0.05}), 503)
            failed(await http.post(MESSAGES, json={**body, "timeout": 0.05}), 408)

    on_stage(silent, act, chats=True)


@pytest.mark.parametrize(("status", "kind"), [(503, "overloaded_error"), (429, "rate_limit_error")])
def test_overload(status: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServerConfig(EngineConfig(model="m"), overload_status=status)

    async def act(stage: Stage) -> None:
        def full(*_: object) -> None:
            raise Overloaded("the queue is full", "queue_full")

        monkeypatch.setattr(stage.client, "open", full)
        async with stage.http() as http:
            answer = await http.post(MESSAGES, json={"messages": [user("x")], "max_tokens": 5})
        assert failed(answer, status)["type"] == kind

    on_stage(saying("x"), act, config, chats=True)


def test_calls_of_one_key() -> None:
    config = ServerConfig(EngineConfig(model="m"), api_key=("k1",), max_calls_per_key=0)

    async def act(stage: Stage) -> None:
        async with stage.http() as http:
            answer = await http.post(MESSAGES, json={}, headers={"x-api-key": "k1"})
        assert failed(answer, 429)["type"] == "rate_limit_error"

    on_stage(saying("x"), act, config)


def test_a_crash_and_a_model_that_is_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(stage: Stage) -> httpx.Response:
        async with stage.http() as http:
            return await http.post(MESSAGES, json={"messages": [user("x")]})

    assert failed(on_stage(silent, act, is_ready=False), 503)["type"] == "overloaded_error"

    def crash(self: Service, model: str) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(Service, "check_model", crash)
    assert failed(on_stage(silent, act), 500)["message"] == "an internal error occurred"


def test_what_the_engine_refuses_has_the_names_of_this_api() -> None:
    def script(submit: Submit) -> list[News]:
        return [Rejected(submit.request_id, "no such grammar", "structured_outputs")]

    form = {"format": {"type": "json_schema", "schema": {}}}
    for stream in (False, True):
        answer = ask(script, output_config=form, stream=stream)
        assert failed(answer, 400)["message"] == "output_config.format: no such grammar"


@pytest.mark.conforms("GET /v1/models", "GET /v1/models/{model}")
def test_models() -> None:
    async def act(stage: Stage) -> None:
        async with stage.http() as http:
            found = (await http.get("/v1/models?limit=1000", headers=VERSION)).json()
            check_models(found)
            assert [model["id"] for model in found["data"]] == ["m"] and not found["has_more"]
            one = (await http.get("/v1/models/m", headers=VERSION)).json()
            check_type(anthropic.types.ModelInfo, one)
            assert one == found["data"][0] and one["lifecycle"] == "active"
            failed(await http.get("/v1/models/gpt", headers=VERSION), 404)
            assert (await http.get("/v1/models")).json()["object"] == "list"

    on_stage(silent, act)


@pytest.mark.parametrize("playground", [False, True])
@pytest.mark.parametrize("keys", [(), ("k1",)])
def test_head_of_the_root(playground: bool, keys: tuple[str, ...]) -> None:
    config = ServerConfig(EngineConfig(model="m"), api_key=keys, playground=playground)

    async def act(stage: Stage) -> None:
        async with stage.http() as http:
            answer = await http.head("/")
            assert answer.status_code == 200 and answer.content == b""
            assert (await http.head("/v1/models")).status_code == (401 if keys else 200)

    on_stage(silent, act, config)


@pytest.mark.conforms("messages.without effect")
@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_thread_is_refused_so_that_clients_go_on_without(
    thread: dict[str, str], stream: bool
) -> None:
    """The tool runner of anthropic 2.14 sends one, and looks for this code."""
    answer = ask(silent, thread=thread, stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    assert error["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    assert "without thread" in error["message"]
    assert ask(saying("x"), thread=None).status_code == 200
    other = ask(silent, nonsense=1)
    assert "details" not in other.json()["error"]
