"""The front end against an engine that this test plays: what a healthy toy never does."""

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from orca_jax.errors import EngineDeadError
from orca_jax.request import RequestUpdate, SamplingParams
from orca_jax.serve.app import create_app
from orca_jax.serve.engine_client import EngineClient, Mailbox
from orca_jax.serve.service import Service
from orca_jax.serve.wire import Abort, Failed, Message, Ready, Rejected, Submit, Updates, decode_to_engine, encode

READY = Ready("byte", vocab_size=257, max_model_len=32, n_slots=24)

Script = Callable[[Submit], Sequence[Message]]


class PlayedEngine(asyncio.Protocol):
    """Answers every `Submit` with what the script says."""

    def __init__(self, client: EngineClient, script: Script) -> None:
        self._client = client
        self._script = script
        self.aborted: list[str] = []

    def take(self, data: bytes) -> None:
        """What the client would write to the socket: one frame at a time."""
        message = decode_to_engine(data[4:])
        if isinstance(message, Abort):
            self.aborted.append(message.request_id)
        elif isinstance(message, Submit):
            for answer in self._script(message):
                asyncio.get_running_loop().call_soon(self._client.data_received, encode(answer))


class PlayedTransport(asyncio.WriteTransport):
    def __init__(self, engine: PlayedEngine) -> None:
        super().__init__()
        self._engine = engine
        self.is_aborted = False

    def write(self, data: Any) -> None:
        self._engine.take(bytes(data))

    def abort(self) -> None:
        self.is_aborted = True


def update(submit: Submit, *ids: int, **fields: Any) -> Updates:
    return Updates([RequestUpdate(submit.request_id, ids, **fields)], running=1, waiting=0)


def call(script: Script, **fields: Any) -> tuple[httpx.Response, list[str]]:
    """The answer to one completion, and the ids of aborted requests."""

    async def run() -> tuple[httpx.Response, list[str]]:
        client = EngineClient()
        engine = PlayedEngine(client, script)
        client.connection_made(PlayedTransport(engine))
        client.data_received(encode(READY))
        service = Service(client, ["m"])
        await service.set_ready(await client.ready)
        transport = httpx.ASGITransport(create_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            body = {"model": "m", "prompt": "x", **fields}
            return await http.post("/v1/completions", json=body), engine.aborted

    return asyncio.run(asyncio.wait_for(run(), 10))


def not_finite(submit: Submit) -> list[Message]:
    return [update(submit, 65), update(submit, finish_reason="error", error="the logits were not finite")]


def test_failed_generation() -> None:
    answer, _ = call(not_finite)
    assert answer.status_code == 500
    assert answer.json()["error"] == {
        "message": "the logits were not finite",
        "type": "server_error",
        "param": None,
        "code": "generation_failed",
    }
    answer, _ = call(not_finite, stream=True)
    first, last, rest = answer.text.split("\n\n")
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "A" and rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "generation_failed"


def test_one_failure_ends_the_other_prompts_of_the_call() -> None:
    def script(submit: Submit) -> list[Message]:
        return not_finite(submit) if submit.prompt_ids == [65] else [update(submit, 66)]

    answer, aborted = call(script, prompt=["A", "B", "C"])
    assert answer.status_code == 500 and aborted == ["r1", "r2"]


def test_rejected_by_the_engine() -> None:
    answer, aborted = call(lambda submit: [Rejected(submit.request_id, "too long", "max_tokens")])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens" and aborted == []


def test_the_smaller_limit_counts() -> None:
    answer, _ = call(lambda submit: [], prompt="x" * 20, max_tokens=5)
    assert (
        answer.json()["error"]["code"] == "context_length_exceeded" and "24 tokens" in answer.json()["error"]["message"]
    )
    seen: list[int] = []

    def script(submit: Submit) -> list[Message]:
        seen.append(submit.params.max_tokens)
        return [update(submit, 65, finish_reason="length")]

    assert call(script, prompt="x" * 20)[0].status_code == 200
    assert seen == [4], "the default of 16 gives way"


def test_pieces_that_come_together_and_past_a_stop() -> None:
    def script(submit: Submit) -> list[Message]:
        return [update(submit, *b"one st"), update(submit, *b"op two"), update(submit, *b"lost")]

    answer, aborted = call(script, stop="stop")
    assert answer.json()["choices"] == [{"index": 0, "text": "one ", "logprobs": None, "finish_reason": "stop"}]
    assert answer.json()["usage"]["completion_tokens"] == 8 and aborted == ["r0"]


def test_a_crash_is_an_error_in_the_right_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Service, model: str) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(Service, "check_model", crash)
    answer, _ = call(lambda submit: [])
    assert answer.status_code == 500 and answer.headers["x-request-id"]
    assert answer.json()["error"]["code"] == "internal_error" and "secret" not in answer.text


def test_client_when_the_engine_talks_nonsense_or_dies() -> None:
    async def run() -> None:
        client = EngineClient()
        transport = PlayedTransport(PlayedEngine(client, lambda submit: []))
        client.connection_made(transport)
        with pytest.raises(EngineDeadError, match="loading"):
            client.open([([1], SamplingParams())])
        client.data_received(encode(READY))
        async with client.open([([1], SamplingParams()), ([2], SamplingParams())]) as mailbox:
            client.data_received(encode(Updates([RequestUpdate("r1", (5,))], 2, 0)))
            client.data_received(b"\0\0\0\1\xc1")
            assert transport.is_aborted
            client.connection_lost(None)
            assert await mailbox.receive() == [(1, RequestUpdate("r1", (5,)))], "what came before is not lost"
            for _ in range(2):
                with pytest.raises(EngineDeadError):
                    await mailbox.receive()
        assert client.state == "dead" and "unreadable" in await client.exit_reason()
        with pytest.raises(EngineDeadError):
            client.open([([1], SamplingParams())])

    asyncio.run(run())


def test_failed_start_is_told_apart() -> None:
    async def run(failure: Failed) -> BaseException | None:
        client = EngineClient()
        client.data_received(encode(failure))
        client.connection_lost(None)
        return client.ready.exception()

    wrong = asyncio.run(run(Failed("no such directory", "model", is_config=True)))
    assert type(wrong).__name__ == "ConfigError" and getattr(wrong, "param", None) == "model"
    assert isinstance(asyncio.run(run(Failed("the engine failed: MemoryError"))), EngineDeadError)


def test_mailbox_keeps_the_first_error() -> None:
    async def run() -> None:
        mailbox = Mailbox(EngineClient(), [])
        mailbox.fail(ValueError("first"))
        mailbox.fail(ValueError("second"))
        with pytest.raises(ValueError, match="first"):
            await mailbox.receive()

    asyncio.run(run())
