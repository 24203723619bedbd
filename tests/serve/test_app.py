"""The front end over a scripted engine, for behaviour that a healthy toy never shows."""

import asyncio
import dataclasses
import gc
import json
import time
from collections import Counter
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import Message

from orca_jax.link.client import MAX_UNREAD
from orca_jax.link.wire import Rejected, Submit
from orca_jax.serve.openai import generation
from orca_jax.serve.openai.completions import prepare
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.generation import Generation
from orca_jax.serve.openai.model import Service
from orca_jax.serve.openai.schema import completion_parser
from orca_jax.server_config import ServerConfig
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.config import EngineConfig
from orca_jax.values.step import NOT_FINITE
from tests.serve.asgi import http_scope
from tests.serve.played import (
    CONTEXT,
    READY,
    News,
    Stage,
    call,
    chat,
    on_stage,
    saying,
    update,
    user,
)


def not_finite(submit: Submit) -> list[News]:
    return [update(submit, 65), update(submit, finish_reason="error", error=NOT_FINITE)]


def silent(submit: Submit) -> list[News]:
    return []


def test_failed_generation() -> None:
    answer, _ = call(not_finite)
    assert answer.status_code == 500 and answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"] == {
        "message": NOT_FINITE,
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }
    answer, _ = call(not_finite, stream=True)
    first, last, rest = answer.text.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "A" and rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "generation_failed"


def test_one_failure_ends_the_other_prompts_of_the_call() -> None:
    def script(submit: Submit) -> list[News]:
        return not_finite(submit) if submit.prompt_ids == [65] else [update(submit, 66)]

    answer, link = call(script, prompt=["A", "B", "C"])
    assert answer.status_code == 500 and link.aborted == ["r1", "r2"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_a_400_also_for_a_stream(stream: bool) -> None:
    def script(submit: Submit) -> list[News]:
        return [Rejected(submit.request_id, "no such grammar", "structured_outputs")]

    answer, link = call(script, stream=stream, structured_outputs={"grammar": "x"})
    assert (
        answer.status_code == 400
        and answer.json()["error"]["param"] == "structured_outputs"
        and link.aborted == []
    )
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}
    answer, _ = call(script, stream=stream, response_format=schema)
    assert answer.json()["error"]["param"] == "response_format", (
        "the caller never said structured_outputs"
    )


def test_the_smaller_limit_counts() -> None:
    answer, _ = call(silent, prompt="x" * CONTEXT)
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded" and f"{CONTEXT} tokens" in error["message"]
    answer, link = call(saying(reason="length"), prompt="x" * 1020)
    assert answer.status_code == 200
    assert link.submitted[0].params.max_tokens == 4, "the default of 16 gives way"


def test_a_chat_may_use_what_the_context_leaves() -> None:
    answer, link = chat(saying("Hello."))
    assert answer.status_code == 200
    (submit,) = link.submitted
    assert submit.params.max_tokens == CONTEXT - len(submit.prompt_ids)
    answer, _ = chat(silent, messages=[user("x" * CONTEXT)])
    assert answer.json()["error"]["param"] == "messages"


def test_pieces_that_come_together_and_past_a_stop() -> None:
    def script(submit: Submit) -> list[News]:
        return [update(submit, *b"one st"), update(submit, *b"op two"), update(submit, *b"lost")]

    answer, link = call(script, stop="stop")
    assert answer.json()["choices"] == [
        {"index": 0, "text": "one ", "logprobs": None, "finish_reason": "stop"}
    ]
    assert answer.json()["usage"]["completion_tokens"] == 8 and link.aborted == ["r0"]
    answer, _ = call(script, stop="stop", include_stop_str_in_output=True)
    assert answer.json()["choices"][0]["text"] == "one stop"


QUIET = {
    "/v1/completions": ": keep-alive\n\n",
    "/v1/chat/completions": ": keep-alive\n\n",
    "/v1/responses": ": keep-alive\n\n",
    "/v1/messages": 'event: ping\ndata: {"type":"ping"}\n\n',
}
"""The event that fills silence, by path."""


@pytest.mark.parametrize("path", QUIET)
def test_a_quiet_engine_is_bridged_before_and_after_the_first_update(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A preempted request has updates, and then none for minutes; proxies close silent connections."""
    monkeypatch.setattr(generation, "QUIET_SECONDS", 0.05)
    fields = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    others = {"messages": [user("x")], "max_tokens": 9}

    async def act(stage: Stage) -> httpx.Response:
        body = {"model": "m", "stream": True, **fields.get(path, others)}
        async with stage.http() as http:
            answering = asyncio.create_task(http.post(path, json=body))
            while not stage.link.submitted:
                await asyncio.sleep(0.001)
            submit = stage.link.submitted[0]
            for news in saying("first", "second")(submit):
                await asyncio.sleep(0.14)
                stage.client.take_message(news)
            return await answering

    text = on_stage(silent, act, chats=path != "/v1/completions").text
    before, first, rest = text.partition("first")
    between, second, _ = rest.partition("second")
    assert first and second
    assert QUIET[path] in before and QUIET[path] in between


def test_a_crash_is_an_error_in_the_right_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Service, model: str) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(Service, "check_model", crash)
    answer, _ = call(silent)
    assert answer.status_code == 500 and answer.headers["x-request-id"]
    assert answer.json()["error"]["code"] == "internal_error" and "secret" not in answer.text
    assert answer.headers["x-should-retry"] == "false"


def test_before_the_model_is_loaded() -> None:
    async def act(stage: Stage) -> list[httpx.Response]:
        body = {"model": "m", "prompt": "x", "messages": [user("x")]}
        async with stage.http() as http:
            completion = await http.post(
                "/v1/completions", json={k: body[k] for k in ("model", "prompt")}
            )
            chatting = await http.post(
                "/v1/chat/completions", json={k: body[k] for k in ("model", "messages")}
            )
            return [
                completion,
                chatting,
                await http.get("/v1/models"),
                await http.post("/tokenize", json={"prompt": "x"}),
            ]

    for answer in on_stage(silent, act, is_ready=False):
        assert answer.status_code == 503 and answer.headers["retry-after"].isdecimal()
        assert answer.json()["error"]["code"] == "engine_unavailable"


@pytest.mark.conforms("completions.timeout", "completions.queue_timeout")
@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [({"timeout": 0.1}, 408, "timeout"), ({"queue_timeout": 0.1}, 503, "queue_timeout")],
)
def test_deadlines_of_the_caller(fields: dict[str, Any], status: int, code: str) -> None:
    answer, link = call(silent, **fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (
        status,
        code,
    ) and link.aborted == ["r0"]
    answer, _ = call(saying("in time"), **fields)
    assert answer.status_code == 200


def test_ends_are_counted_by_reason() -> None:
    async def act(stage: Stage) -> dict[str, float]:
        scripts = (
            saying("a"),
            saying("a", reason="length"),
            saying("b", reason="length"),
            not_finite,
            silent,
        )
        async with stage.http() as http:
            for script in scripts:
                stage.link.script = script
                fields = {"timeout": 0.05} if script is silent else {"n": 2}
                await http.post("/v1/completions", json={"model": "m", "prompt": "x", **fields})
        return stage.ends()

    assert on_stage(silent, act) == {"stop": 2, "length": 4, "error": 2, "timeout": 1}


@pytest.mark.parametrize(
    "body", [{"stream": True}, {"stream": False}, {"stream": True, "n": 3}, {"prompt": ["a", "b"]}]
)
def test_who_hangs_up_frees_the_engine(body: dict[str, Any]) -> None:
    async def act(stage: Stage) -> tuple[int, list[str], int, dict[str, float]]:
        content = json.dumps({"model": "m", "prompt": "x", **body}).encode()
        messages = [
            {"type": "http.request", "body": content, "more_body": False},
            {"type": "http.disconnect"},
        ]
        sent: list[Message] = []

        async def receive() -> Message:
            return messages.pop(0)

        async def send(message: Message) -> None:
            sent.append(message)

        scope = http_scope("/v1/completions", "POST", [(b"content-type", b"application/json")])
        await stage.app(scope, receive, send)
        assert sent == [], "the client has gone"
        return len(stage.link.submitted), stage.link.aborted, stage.client.num_calls, stage.ends()

    count, aborted, open_calls, ends = on_stage(silent, act)
    assert len(aborted) == count > 0 and open_calls == 0 and ends == {"abort": count}


def own_objects() -> Counter[str]:
    """The number of objects of each class of this package, those of unreachable cycles included."""
    kinds = Counter(type(thing) for thing in gc.get_objects())
    return Counter(
        {
            kind.__qualname__: n
            for kind, n in kinds.items()
            if str(kind.__module__).startswith("orca_jax.")
        }
    )


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "end", ["whole", "client gone", "timeout", "engine lost", "refused", "failed", "too slow"]
)
def test_an_ended_call_leaves_no_objects_for_the_garbage_collector(end: str, stream: bool) -> None:
    """The server collects garbage rarely, so a cycle for each aborted stream would hold hundreds of megabytes."""
    scripts = {
        "whole": saying("x"),
        "refused": lambda submit: [Rejected(submit.request_id, "no", "prompt")],
        "failed": not_finite,
        "too slow": lambda submit: [update(submit, 65) for _ in range(MAX_UNREAD + 1)],
    }

    async def one(stage: Stage) -> None:
        body = {"model": "m", "prompt": "x", "stream": stream} | (
            {"timeout": 0.01} if end == "timeout" else {}
        )
        request = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        messages = [request, *([{"type": "http.disconnect"}] if end == "client gone" else [])]

        async def receive() -> Message:
            return messages.pop(0) if messages else await asyncio.get_running_loop().create_future()

        async def send(message: Message) -> None:
            pass

        if end == "engine lost":
            asyncio.get_running_loop().call_later(0.01, stage.client.lose, "dead")
        await stage.app(
            http_scope("/v1/completions", "POST", [(b"content-type", b"application/json")]),
            receive,
            send,
        )
        stage.link.submitted.clear()
        if end == "engine lost":
            stage.client.attach(stage.link)  # type: ignore[arg-type]
            stage.client.serve(READY)

    async def act(stage: Stage) -> Counter[str]:
        for _ in range(3):
            await one(stage)
        before = own_objects()
        for _ in range(20):
            await one(stage)
        return own_objects() - before

    gc.freeze()  # objects of other tests need not be visited
    gc.disable()
    try:
        grown = on_stage(scripts.get(end, silent), act)
    finally:
        gc.enable()
        gc.unfreeze()
    assert max(grown.values(), default=0) < 20, grown


def test_closing_the_pieces_early_ends_the_requests() -> None:
    async def act(stage: Stage) -> tuple[list[str], int]:
        body, _ = completion_parser.parse(b'{"model": "m", "prompt": ["x", "y"]}')
        job = await prepare(stage.service, body, "req_1")
        forever: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        pieces = Generation(stage.service, job).pieces(lambda: forever)
        assert [piece.text for piece in await anext(pieces)] == ["A", "A"]
        await pieces.aclose()
        return stage.link.aborted, stage.client.num_calls

    assert on_stage(lambda submit: [update(submit, 65)], act) == (["r0", "r1"], 0)


def test_operators_may_allow_fewer_logprobs() -> None:
    config = ServerConfig(EngineConfig(model="m"), max_logprobs=2)
    for fields in ({"logprobs": 3}, {"prompt_logprobs": 3}):
        answer, _ = call(silent, config=config, **fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] in fields
    answer, _ = chat(silent, config=config, logprobs=True, top_logprobs=3)
    assert answer.json()["error"]["param"] == "top_logprobs"


def test_many_unknown_names_are_refused_at_once() -> None:
    body = ",".join(f'"name{i}": 1' for i in range(190_000))
    start = time.process_time()
    with pytest.raises(ApiError, match="name0"):
        completion_parser.parse(b'{"model": "m", ' + body.encode() + b"}")
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "crowd", [b"1," * 4_000_001 + b"1", b"[1]," * 400_000 + b"[1]", b'{"a":' * 400_001]
)
def test_crowds_are_not_read(crowd: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        completion_parser.parse(b'{"model": "m", "prompt": [' + crowd + b"]}")
    assert (refused.value.status, refused.value.code) == (413, "request_too_large")


def test_a_new_engine_with_the_same_model_keeps_its_text_side() -> None:
    async def act(stage: Stage) -> bool:
        model = stage.service.model
        await stage.service.set_ready(READY)
        same = stage.service.model is model
        await stage.service.set_ready(msgspec.structs.replace(READY, n_slots=7))
        return same and stage.service.model.context == 7

    assert on_stage(silent, act, chats=True)


def test_repeated_ids_are_one() -> None:
    _, link = call(saying("x"), allowed_token_ids=[65, 66, 65] * 1000)
    assert link.submitted[0].params.allowed_token_ids == (65, 66)


def test_contradictions_are_the_callers() -> None:
    def script(submit: Submit) -> list[News]:
        return [
            update(submit, 65),
            update(submit, finish_reason="error", error="no token could follow"),
        ]

    answer, _ = call(script)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_token_allowed"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_defaults_of_the_model_directory() -> None:
    async def act(stage: Stage) -> list[tuple[float, int, int]]:
        defaults = {"temperature": 0.25, "top_k": 9, "max_tokens": 7}
        stage.service._model = dataclasses.replace(stage.service.model, defaults=defaults)
        async with stage.http() as http:
            for fields in (
                {},
                {"temperature": 1.0, "max_tokens": 3},
                {"prompt": "x" * (CONTEXT - 2)},
            ):
                answer = await http.post(
                    "/v1/completions", json={"model": "m", "prompt": "x", **fields}
                )
                assert answer.status_code == 200
        params = [submit.params for submit in stage.link.submitted]
        return [(one.temperature, one.top_k, one.max_tokens) for one in params]

    assert on_stage(saying("x"), act) == [(0.25, 9, 7), (1.0, 9, 3), (0.25, 9, 2)]


def test_texts_that_cannot_fit_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: ByteTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        assert len(text) < 100, "the text must not be tokenized"  # labels of decisions are
        return list(text.encode())

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    for path, fields in (
        ("/v1/completions", {"prompt": ["x" * 20_000]}),
        ("/v1/chat/completions", {"messages": [user("x" * 20_000)]}),
    ):
        answer, link = call(silent, path, **fields)
        assert (
            answer.status_code == 400
            and answer.json()["error"]["code"] == "context_length_exceeded"
        )
        assert answer.json()["error"]["param"] in fields and link.submitted == []
