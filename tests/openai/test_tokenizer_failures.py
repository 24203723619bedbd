"""A tokenizer that panics or hangs ends its own calls only."""

import asyncio
import dataclasses
import threading
from pathlib import Path

import httpx
import pytest

from orca_jax.link.client import EngineClient
from orca_jax.serve.openai import model
from orca_jax.serve.openai.model import ModelTexts, Service
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.server_config import ServerConfig
from orca_jax.text.tokenizer import ByteTokenizer, load_tokenizer
from orca_jax.text.work_threads import ENCODING as TEXTS
from orca_jax.text.work_threads import WorkThreads
from orca_jax.values.config import EngineConfig
from tests.serve.played import READY, Stage, on_stage, saying, user
from tests.text.hostile import PANICS, write_hostile_tokenizer

ENCODING = (
    ("/v1/completions", {"prompt": PANICS}, "prompt"),
    ("/v1/chat/completions", {"messages": [user(PANICS)]}, "messages"),
    ("/tokenize", {"prompt": PANICS}, "prompt"),
    ("/v1/completions", {"prompt": [0], "bad_words": [PANICS]}, "bad_words"),
)


def test_a_panic_of_the_tokenizer_is_an_error_of_its_call(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def act(stage: Stage) -> None:
        tokenizer = load_tokenizer(write_hostile_tokenizer(tmp_path))
        stage.service._model = dataclasses.replace(stage.service.model, tokenizer=tokenizer)
        async with stage.http() as http:
            for path, fields, param in ENCODING:
                answer = await http.post(path, json={"model": "m", **fields})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, param)
                assert "the tokenizer fails" in error["message"]
            answer = await http.post("/tokenize", json={"prompt": "ab"})
            assert answer.json()["tokens"] == [0, 1]

    on_stage(saying("a"), act, chats=True)
    capfd.readouterr()  # the library writes its panics to standard error


def test_calls_of_the_tokenizer_that_hang_delay_no_other_call() -> None:
    """Each ends with an error in time; when too many hang, further texts are refused with a 503."""
    end, hanging, now = threading.Event(), list[str](), [0.0]

    class Slow(ByteTokenizer):
        is_bounded = False

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            if "hang" in text:
                hanging.append(text)
                end.wait()
            return super().encode(text, add_special_tokens)

    async def hang(http: httpx.AsyncClient, number: int) -> asyncio.Task[httpx.Response]:
        task = asyncio.create_task(http.post("/tokenize", json={"prompt": f"hang {number}"}))
        while len(hanging) < number:
            await asyncio.sleep(0.001)
        return task

    async def act(stage: Stage) -> None:
        stage.service._model = dataclasses.replace(stage.service.model, tokenizer=Slow())
        kind = TEXTS._replace(seconds=10, num_threads=2, most_abandoned=1)
        stage.service.work.threads[TEXTS] = WorkThreads(kind, clock=lambda: now[0])
        async with stage.http() as http:
            stuck = [await hang(http, 1), await hang(http, 2)]
            well = asyncio.create_task(
                http.post("/v1/completions", json={"model": "m", "prompt": "well"})
            )
            assert (await http.get("/health")).status_code == 200
            now[0] = 11
            assert (await well).status_code == 200
            stuck.append(await hang(http, 3))
            now[0] = 22
            for task in stuck:
                answer = await task
                assert (
                    answer.status_code == 400
                    and "longer than 10 s" in answer.json()["error"]["message"]
                )
            refused = await http.post("/tokenize", json={"prompt": "well"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "tokenizer_unavailable",
            )
            given = await http.post("/v1/completions", json={"model": "m", "prompt": [65]})
            assert given.status_code == 200, "ids need no tokenizer"

    try:
        on_stage(saying("a"), act)
    finally:
        end.set()


def test_special_tokens_are_known_by_their_texts() -> None:
    async def act() -> None:
        config = ServerConfig(EngineConfig(model="m"))
        service = Service(EngineClient(config), config, ServerObserver(config))
        await service.set_ready(READY)
        service.close()
        assert service.model.specials == {"<|end|>": 256}

    asyncio.run(act())


def test_an_engine_may_be_ready_before_the_texts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`set_ready` takes the texts while `read_texts` waits for them."""
    go_on = threading.Event()
    made = ModelTexts("", {}, None)

    def read(config: ServerConfig, *, with_tokenizer: bool = False) -> ModelTexts:
        assert go_on.wait(60)
        return made

    async def act() -> None:
        config = ServerConfig(EngineConfig(model="m"))
        service = Service(EngineClient(config), config, ServerObserver(config))
        reading = asyncio.create_task(service.read_texts())
        await asyncio.sleep(0)
        ready = asyncio.create_task(service.set_ready(READY))
        await asyncio.sleep(0.01)
        go_on.set()
        await reading
        await ready
        service.close()
        assert service.model.vocab_size == READY.vocab_size

    monkeypatch.setattr(model, "_read_texts", read)
    asyncio.run(asyncio.wait_for(act(), 60))
