"""Answers of the health checks."""

from collections.abc import Iterator

import httpx
import msgspec
import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.serve.played import READY, Stage, on_stage
from tests.serve.running import Server, running


@pytest.mark.conforms("GET /live", "GET /ready", "GET /health", "GET /health_generate", "GET /load")
def test_a_server_that_works(idle_server: Server) -> None:
    get = idle_server.http.get
    assert (get("/live").status_code, get("/live").json()) == (200, {"status": "live"})
    engine = get("/ready").json()["engine"]
    for path, details in (("/ready", {"engine": engine}), ("/health", {})):
        answer = get(path)
        assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
        assert answer.json() == {"status": "ready", "running": 0, "waiting": 0, **details}, (
            "details need a key"
        )
    assert (engine["max_model_len"], engine["scheduler"], engine["device"]) == (8192, "chunked", "")
    assert 0 < engine["start"]["seconds"]["import"] <= engine["start"]["total"]
    assert (get("/health_generate").status_code, get("/health_generate").json()) == (
        200,
        {"status": "ready"},
    )
    assert get("/load").json() == {"server_load": 0}
    with idle_server.stream(["a", "b"], max_tokens=8000, ignore_eos=True) as events:
        next(events)
        assert get("/load").json() == {"server_load": 1}, "calls, not choices"


@pytest.mark.conforms("GET /health_generate")
def test_generating_is_more_than_answering() -> None:
    """A full engine answers probes, but generates nothing for new calls."""
    with running("--max-num-seqs", "1", "--max-num-queued-reqs", "0") as server:
        with server.stream("x", max_tokens=8000, ignore_eos=True) as events:
            next(events)
            assert server.health().status_code == 200
            answer = server.http.get("/health_generate")
            assert answer.status_code == 503
            assert answer.json() == {
                "status": "ready",
                "error": "the queue is full; try again later",
            }
        server.wait_idle()
        assert server.http.get("/health_generate").status_code == 200


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    """A server with a key, below a path of a proxy."""
    with running("--root-path", "/llm", "--api-key", "secret", api_key="secret") as server:
        yield server


def test_what_is_open_without_a_key(guarded: Server) -> None:
    assert guarded.health().status_code == 200
    for path, status in (
        ("/live", 200),
        ("/health", 200),
        ("/ready", 401),
        ("/load", 401),
        ("/metrics", 401),
    ):
        assert httpx.get(guarded.url + path).status_code == status
    assert guarded.http.get("/health_generate").status_code == 200
    assert "secret" not in " ".join(guarded.lines)


def test_results_of_the_attention_kernels_are_shown() -> None:
    tests = {"gpu": "hang", "triton": "ok"}

    async def act(stage: Stage) -> object:
        stage.client.serve(msgspec.structs.replace(READY, self_tests=tests))
        async with stage.http() as http:
            return (await http.get("/health")).json()

    assert on_stage(lambda submit: (), act) == {
        "status": "ready",
        "running": 0,
        "waiting": 0,
        "attention_self_test": tests,
    }


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/health_generate", "/load"])
def test_probes_only_read(server: Server, path: str) -> None:
    assert server.http.post(path).status_code == 405


def test_root_path(guarded: Server) -> None:
    """A proxy may keep or strip the prefix; keys guard both forms."""
    for prefix in ("", "/llm"):
        assert guarded.http.get(f"{prefix}/v1/models").json()["data"][0]["id"] == "preset:toy"
        for path, status in (
            ("/health", 200),
            ("/v1/models", 401),
            ("/metrics", 401),
            ("/health/", 401),
        ):
            assert httpx.get(f"{guarded.url}{prefix}{path}").status_code == status
    assert guarded.http.get("/llmx/v1/models").status_code == 404
    assert httpx.get(f"{guarded.url}/llm/llm/health").status_code == 401
    assert guarded.complete("hi", max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("keys", "health"), [((), "no file /srv/lora/a"), (("k",), "see /ready, with a key")]
)
def test_reasons_with_paths_need_a_key(keys: tuple[str, ...], health: str) -> None:
    config = ServerConfig(EngineConfig(model="m"), api_key=keys)
    key = {"authorization": "Bearer k"} if keys else {}

    async def act(stage: Stage) -> list[str]:
        stage.client.adapters.lost["a"] = "no file /srv/lora/a"
        async with stage.http() as http:
            answers = [await http.get("/health"), await http.get("/ready", headers=key)]
        return [answer.json()["lost_adapters"]["a"] for answer in answers]

    assert on_stage(lambda submit: [], act, config) == [health, "no file /srv/lora/a"]
