"""An engine behind the application, without a socket of its own."""

import asyncio
from typing import Any

import httpx
import psutil
import pytest
from starlette.types import Message

from orca_jax.server_config import ServerConfig
from orca_jax.tools.deploy.replica import EngineReplica, Replica
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError, EngineDeadError
from tests.serve.running import MODEL, engine_of

pytestmark = pytest.mark.usefixtures("process_as_before")


def config_of(**settings: Any) -> ServerConfig:
    return ServerConfig(
        engine=EngineConfig(model=MODEL, max_num_seqs=4, **settings), shutdown_timeout=10
    )


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app), base_url="http://localhost", timeout=60
    )


def test_a_replica_answers_drains_and_stops() -> None:
    async def run() -> None:
        replica = Replica(config_of())
        assert replica.stats() == {"running": 0, "waiting": 0, "calls": 0}
        app = await replica.start()
        engine = engine_of(psutil.Process().pid)
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 60, "ignore_eos": True}
        async with client_of(app) as http:
            whole = asyncio.create_task(http.post("/v1/completions", json=body))
            while not replica.stats()["running"]:
                await asyncio.sleep(0.01)
            replica.check()
            stopping = asyncio.create_task(replica.stop())
            await asyncio.sleep(0)
            assert (await http.post("/v1/completions", json=body)).status_code == 503, (
                "a draining replica accepts calls"
            )
            answer = (await whole).json()
            await stopping
        assert answer["usage"]["completion_tokens"] == 60
        assert not engine.is_running()

    asyncio.run(run())


def test_the_end_of_the_engine_is_the_end_of_the_replica() -> None:
    async def run() -> None:
        replica = Replica(config_of())
        app = await replica.start()
        engine_of(psutil.Process().pid).kill()
        await asyncio.wait_for(replica.ended(), 60)
        with pytest.raises(EngineDeadError, match="was killed by SIGKILL"):
            replica.check()
        async with client_of(app) as http:
            refused = await http.get("/health")
            assert (refused.status_code, refused.json()["status"]) == (503, "dead")
        await replica.stop()

    asyncio.run(run())


def test_a_wrong_setting_ends_the_start() -> None:
    async def run() -> None:
        replica = Replica(config_of(num_pages=0))
        with pytest.raises(ConfigError, match="num_pages") as caught:
            await replica.start()
        assert caught.value.param == "num_pages"
        await replica.stop()

    asyncio.run(run())


def test_the_hooks_of_ray_serve() -> None:
    """Ray Serve gives each call its id and adds the header of the answer; at its end it ends the lifespan."""

    async def run() -> None:
        replica = EngineReplica(config_of())
        app = await replica.__serve_build_asgi_app__()
        await replica.check_health()
        async with client_of(app) as http:
            answer = await http.get("/health", headers={"x-request-id": "r1"})
        assert answer.status_code == 200 and "x-request-id" not in answer.headers
        assert replica.record_routing_stats() == {"running": 0, "waiting": 0, "calls": 0}
        engine = engine_of(psutil.Process().pid)
        host = iter(("lifespan.startup", "lifespan.shutdown"))
        told: list[str] = []

        async def receive() -> Message:
            return {"type": next(host)}

        async def send(message: Message) -> None:
            told.append(message["type"])

        await app({"type": "lifespan"}, receive, send)
        assert told == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        assert not engine.is_running()

    asyncio.run(run())
