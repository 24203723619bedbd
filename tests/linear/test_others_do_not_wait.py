"""Nobody waits for the work on another caller's body: `/live` answers within 100 ms of processor time."""

import asyncio
import time
from pathlib import Path

import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.linear.attacks import ATTACKS, TEMPLATE
from tests.serve.played import Stage, on_stage, saying

SIZE = 256 * 1024  # bytes; `tests/chaos/test_attacks.py` has the largest ones
MOST = 0.1  # seconds of processor time of the whole process, from a call of /live to its answer
JSON = {"content-type": "application/json"}


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    template = tmp_path / "thinking.jinja"
    template.write_text(TEMPLATE)
    return ServerConfig(EngineConfig(model="m"), chat_template=str(template), playground=True)


def waits(config: ServerConfig, path: str, body: bytes, calls: int = 3) -> list[float]:
    """The processor time for which each call of `/live` waits while others send a body."""

    async def act(stage: Stage) -> list[float]:
        found: list[float] = []
        async with stage.http() as http:
            await http.get("/live")
            sending = [
                asyncio.create_task(http.post(path, content=body, headers=JSON))
                for _ in range(calls)
            ]
            while not all(task.done() for task in sending):
                start = time.process_time()
                assert (await http.get("/live")).status_code == 200
                found.append(time.process_time() - start)
                await asyncio.sleep(0.001)
            for task in sending:
                assert task.result().status_code in (200, 400, 413), task.result().text
        return found

    return on_stage(saying("x"), act, config, chats=True)


@pytest.mark.parametrize("name", ATTACKS)
def test_live_answers_whatever_runs(config: ServerConfig, name: str) -> None:
    path, make = ATTACKS[name]
    assert max(waits(config, path, make(SIZE))) < MOST


def test_live_answers_beside_bursts(config: ServerConfig) -> None:
    body = b'{"requests": [' + b",".join([b"[900, 1]"] * 60) + b"]}"
    assert max(waits(config, "/playground/burst", body)) < MOST
