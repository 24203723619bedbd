"""Adapters over HTTP and in `LLM`, with the toy, whose adapters are numbers."""

import asyncio
import hashlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path

import httpx
import pytest

from orca_jax import LLM, LoRARequest, SamplingParams
from orca_jax.assembly.engine import build_engine
from orca_jax.link.client import EngineClient
from orca_jax.link.loop import ready_message
from orca_jax.link.thread_link import EngineThread
from orca_jax.serve.app import create_app
from orca_jax.serve.args import check
from orca_jax.serve.openai.model import Model, Service
from orca_jax.serve.telemetry.observer import ServerObserver
from orca_jax.server_config import ServerConfig
from orca_jax.sim.toy import TOY_MODEL, toy_pooled
from orca_jax.text.tokenizer import load_tokenizer
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError, RequestError
from tests.sim.oracle import toy_generate

TOY = "preset:toy"
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}


def make_adapter(folder: Path, content: str) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(content, encoding="utf-8")
    return folder


def number_of(content: str) -> int:
    return 1 + int(hashlib.sha256(content.encode()).hexdigest()[:8], 16) % 10_000


def answer(prompt: str, adapter: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    return toy_generate(
        list(prompt.encode()), params, vocab_size=TOY_MODEL.vocab_size, adapter=adapter
    )


@asynccontextmanager
async def served(config: ServerConfig) -> AsyncIterator[tuple[httpx.AsyncClient, ServerObserver]]:
    observer = ServerObserver(config)
    client = EngineClient(config, observer.heartbeat)
    observer.follow(client)
    service = Service(client, config, observer)
    with build_engine(config.engine) as built:
        thread = EngineThread(built, client)
        client.attach(thread)
        ready = ready_message(built)
        client.serve(ready)
        await service.set_ready(ready)
        transport = httpx.ASGITransport(
            create_app(service, config, observer), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=60
        ) as http:
            yield http, observer
        await thread.stop()
    service.close()


def on_server(
    config: ServerConfig, act: Callable[[httpx.AsyncClient, ServerObserver], Awaitable[None]]
) -> None:
    async def run() -> None:
        async with served(config) as (http, observer):
            await act(http, observer)

    asyncio.run(asyncio.wait_for(run(), 60))


async def complete(http: httpx.AsyncClient, model: str) -> httpx.Response:
    return await http.post("/v1/completions", json={"model": model, "prompt": "hi", **GREEDY})


@pytest.fixture(autouse=True)
def without_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process for a chat template."""
    texts = Model(load_tokenizer("byte"), None, {}, TOY_MODEL.vocab_size, 2048, 7 * 2048, 2048)
    monkeypatch.setattr("orca_jax.serve.openai.model._load", lambda *_: texts)


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    (tmp_path / "dir").mkdir()
    make_adapter(tmp_path / "dir" / "one", "one")
    make_adapter(tmp_path / "dir" / "two", "two")
    first = make_adapter(tmp_path / "first", "first")
    engine = EngineConfig(
        model=TOY, enable_lora=True, max_loras=1, max_cpu_loras=3, lora_modules=(f"start={first}",)
    )
    return ServerConfig(engine, lora_dir=str(tmp_path / "dir"), log_requests=False)


def test_adapters_are_chosen_by_the_name_of_the_model(config: ServerConfig) -> None:
    async def act(http: httpx.AsyncClient, observer: ServerObserver) -> None:
        load = {"lora_name": "mine", "lora_path": "one", "lora_int_id": 7}
        done = await http.post("/v1/load_lora_adapter", json=load)
        assert done.headers["x-orca-ignored-fields"] == "lora_int_id"
        assert (done.status_code, done.text) == (
            200,
            "Success: LoRA adapter 'mine' added successfully.",
        )
        answers = await asyncio.gather(
            *(complete(http, model) for model in (TOY, "start", "mine") * 3)
        )
        for one, (name, number) in zip(
            answers,
            [(TOY, 0), ("start", number_of("first")), ("mine", number_of("one"))] * 3,
            strict=True,
        ):
            assert one.json()["model"] == name
            assert one.json()["choices"][0]["token_ids"] == answer("hi", number)
        cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
        assert list(cards) == [TOY, "start", "mine"]
        assert cards["mine"]["parent"] == TOY and cards["mine"]["root"].endswith("/dir/one")
        assert "parent" not in cards[TOY]
        assert (await http.get("/v1/models/mine")).json() == cards["mine"]

    on_server(config, act)


@pytest.mark.conforms("embeddings.model")
def test_embeddings_are_of_the_adapter_that_is_asked_for(config: ServerConfig) -> None:
    async def act(http: httpx.AsyncClient, observer: ServerObserver) -> None:
        for name, number in ((TOY, 0), ("start", number_of("first"))):
            body = {"model": name, "input": "hi", "normalize": False}
            found = (await http.post("/v1/embeddings", json=body)).json()
            sums = list(accumulate((i + 1) * (token + 1 + number) for i, token in enumerate(b"hi")))
            vector = list(array("f", toy_pooled(sums, "last", TOY_MODEL.vocab_size)))
            assert (found["model"], found["data"][0]["embedding"]) == (name, vector)

    on_server(config, act)


def test_unloaded_names_are_refused_and_may_be_used_again(config: ServerConfig) -> None:
    async def act(http: httpx.AsyncClient, observer: ServerObserver) -> None:
        for path in ("one", "two"):
            await http.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": path})
            found = (await complete(http, "mine")).json()["choices"][0]["token_ids"]
            assert found == answer("hi", number_of(path))
            done = await http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
            assert (done.status_code, done.text) == (
                200,
                "Success: LoRA adapter 'mine' removed successfully.",
            )
            gone = await complete(http, "mine")
            assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"
        again = await http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
        assert again.status_code == 404 and again.json()["error"]["param"] == "lora_name"

    on_server(config, act)


def test_loads_that_are_refused(config: ServerConfig) -> None:
    async def act(http: httpx.AsyncClient, observer: ServerObserver) -> None:
        async def refusal(name: str, path: str) -> tuple[int, str, str]:
            done = await http.post(
                "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}
            )
            error = done.json()["error"]
            return done.status_code, error["param"], error["message"]

        outside = (400, "lora_path", "lora_path must be a directory inside the server's --lora-dir")
        Path(config.lora_dir or "", "loop").symlink_to("loop")
        wrong_paths = (
            "../first",
            "/etc",
            ".",
            "",
            "none",
            "one/adapter_config.json",
            "a\0b",
            "x" * 5000,
        )
        for path in (*wrong_paths, "loop", "loop/x"):
            assert await refusal("mine", path) == outside
        assert (await refusal(TOY, "one"))[:2] == (400, "lora_name")
        assert (await refusal("start", "one"))[2].startswith(
            "the adapter 'start' is loaded already"
        )
        for name in ("", "a,b", "a\n", "x" * 257):
            expected = "lora_name must be 1 to 256 printable characters without a comma, got "
            assert await refusal(name, "one") == (400, "lora_name", f"{expected}{name[:80]!r}")
        Path(config.lora_dir or "", "empty").mkdir()
        assert (await refusal("mine", "empty"))[1] == "lora_path"
        for name in ("a", "b"):
            await http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": "one"})
        assert (await refusal("c", "two"))[2].startswith("3 adapters are loaded")
        wrong = await http.post(
            "/v1/load_lora_adapter", json={"lora_name": "c", "lora_path": "two", "load_inplace": 1}
        )
        assert wrong.status_code == 400 and "load_inplace" in wrong.json()["error"]["message"]

    on_server(config, act)


def test_without_a_directory_there_are_no_routes(config: ServerConfig) -> None:
    async def act(http: httpx.AsyncClient, observer: ServerObserver) -> None:
        assert (await http.post("/v1/load_lora_adapter", json={})).status_code == 404
        metrics = observer.render().decode()
        assert (
            'vllm:lora_requests_info{max_lora="1",running_lora_adapters="",waiting_lora_adapters=""}'
            in metrics
        )

    on_server(ServerConfig(config.engine, log_requests=False), act)


def test_llm(tmp_path: Path) -> None:
    one, two = (
        LoRARequest(name, str(make_adapter(tmp_path / name, name))) for name in ("one", "two")
    )
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(TOY, enable_lora=True, max_loras=1) as llm:
        outputs = llm.generate(["hi"] * 3, params, use_tqdm=False, lora_request=[one, None, two])
        found = [list(output.outputs[0].token_ids) for output in outputs]
        assert found == [answer("hi", number) for number in (number_of("one"), 0, number_of("two"))]
        with pytest.raises(RequestError, match="lora_name 'one' stands for"):
            llm.generate("hi", lora_request=LoRARequest("one", two.lora_path))
        with pytest.raises(RequestError, match="2 lora_requests for 1 prompts"):
            llm.generate("hi", lora_request=[one, two])
        with pytest.raises(RequestError, match="not str"):
            llm.generate("hi", lora_request="one")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="without a comma, got 'a,b'"):
            LoRARequest("a,b", one.lora_path)
        llm.unload_lora("one")
        (output,) = llm.generate(
            "hi", params, use_tqdm=False, lora_request=LoRARequest("one", two.lora_path)
        )
        assert list(output.outputs[0].token_ids) == answer("hi", number_of("two"))
    with LLM(TOY) as llm, pytest.raises(RequestError, match="enable_lora=True"):
        llm.generate("hi", lora_request=one)


@pytest.mark.parametrize(
    ("settings", "param", "message"),
    [
        ({"max_loras": 2}, "max_loras", "needs enable_lora"),
        ({"lora_modules": ("a=b",)}, "lora_modules", "needs enable_lora"),
        (
            {"enable_lora": True, "lora_modules": ("a",)},
            "lora_modules",
            "must be NAME=PATH, or .*; got 'a'",
        ),
        (
            {"enable_lora": True, "lora_modules": ("a=b", "a=c")},
            "lora_modules",
            "the name 'a' twice",
        ),
        (
            {"enable_lora": True, "lora_modules": ("a,b=c",)},
            "lora_modules",
            "without a comma, got 'a,b'",
        ),
        ({"enable_lora": True, "max_loras": 0}, "max_loras", "at least 1"),
        (
            {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3},
            "max_cpu_loras",
            "less than max_loras 4",
        ),
        (
            {
                "enable_lora": True,
                "max_cpu_loras": 1,
                "max_loras": 1,
                "lora_modules": ("a=b", "c=d"),
            },
            "lora_modules",
            "more than max_cpu_loras 1",
        ),
        ({"enable_lora": True, "lora_modules": ("a=none",)}, "lora_modules", "cannot be read"),
    ],
)
def test_wrong_settings(settings: dict[str, object], param: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build_engine(EngineConfig(model=TOY, **settings))  # type: ignore[arg-type]
    assert error.value.param == param


def test_wrong_flags(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --enable-lora"):
        check(ServerConfig(EngineConfig(TOY), lora_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="is not a directory"):
        check(ServerConfig(EngineConfig(TOY, enable_lora=True), lora_dir=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="is the name of the model"):
        check(ServerConfig(EngineConfig(TOY, enable_lora=True, lora_modules=(f"{TOY}=x",))))
