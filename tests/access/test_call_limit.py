"""`--max-calls-per-key`: one caller cannot hold the server."""

import asyncio

import httpx

from orca_jax.link.wire import Submit
from orca_jax.server_config import ServerConfig
from tests.serve.asgi import bearer
from tests.serve.played import News, Stage, events, on_stage, saying, update

HELD = "hold"


def script(submit: Submit) -> list[News]:
    """Prompts of `hold` get one token and no end."""
    held = bytes(submit.prompt_ids).decode() == HELD
    return [update(submit, 65)] if held else list(saying("ok")(submit))


async def post(
    stage: Stage, path: str = "/v1/completions", key: str | None = None, **body: object
) -> httpx.Response:
    headers = [] if key is None else bearer(key)
    async with stage.http() as http:
        return await http.post(path, json={"prompt": "x", "max_tokens": 4, **body}, headers=headers)


async def held(
    stage: Stage, count: int, key: str | None = None
) -> list[asyncio.Task[httpx.Response]]:
    """Calls that stay open."""
    before = stage.client.num_calls
    calls = [
        asyncio.create_task(post(stage, key=key, prompt=HELD, stream=True)) for _ in range(count)
    ]
    while stage.client.num_calls < before + count:
        await asyncio.sleep(0)
    return calls


async def ended(calls: list[asyncio.Task[httpx.Response]]) -> None:
    for one in calls:
        one.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


def test_a_key_has_so_many_calls_and_others_have_theirs() -> None:
    async def act(stage: Stage) -> None:
        calls = await held(stage, 3, "a")
        others = (
            "/v1/responses",
            "/v1/responses/input_tokens",
            "/v1/embeddings",
            "/tokenize",
            "/playground/burst",
        )
        for path in ("/v1/completions", "/v1/chat/completions", *others):
            answer = await post(stage, path, "a")
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (
                429,
                "too_many_calls",
                "rate_limit_error",
            )
            assert (
                answer.headers["retry-after"] == "1" and "--max-calls-per-key" in error["message"]
            )
        assert len(stage.link.submitted) == 3, "a refused call never reaches the engine"
        async with stage.http() as http:
            assert (await http.get("/v1/models", headers=bearer("a"))).status_code == 200
        assert (await post(stage, key="b")).status_code == 200
        await ended(calls[:1])
        assert (await post(stage, key="a")).status_code == 200
        assert (await post(stage, key="a")).status_code == 200, "an ended call does not count"
        assert (await post(stage, key="a", max_tokens="no")).status_code == 400
        assert (await post(stage, key="a")).status_code == 200, "nor does a refused one"
        await ended(calls[1:])

    on_stage(script, act, ServerConfig(max_calls_per_key=3, api_key=("a", "b"), playground=True))


def test_callers_without_keys_are_one() -> None:
    async def act(stage: Stage) -> None:
        calls = await held(stage, 2)
        assert (await post(stage, user="another")).status_code == 429
        await ended(calls)
        assert (await post(stage)).status_code == 200

    on_stage(script, act, ServerConfig(max_calls_per_key=2))


def test_without_a_limit() -> None:
    async def act(stage: Stage) -> None:
        calls = await held(stage, 20)
        assert (await post(stage)).status_code == 200
        await ended(calls)

    on_stage(script, act, ServerConfig())


def test_a_stream_counts_until_its_end() -> None:
    async def act(stage: Stage) -> None:
        answer = await post(stage, stream=True)
        assert answer.status_code == 200 and events(answer)
        assert (await post(stage, stream=True)).status_code == 200

    on_stage(script, act, ServerConfig(max_calls_per_key=1))
