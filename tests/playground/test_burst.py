"""The route of bursts: limits before any work, and errors for bodies that are not bursts."""

import httpx
import pytest

from orca_jax.serve.playground import burst
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.serve.played import CONTEXT, Stage, on_stage, saying

JSON = {"content-type": "application/json"}
PLAYED = ServerConfig(EngineConfig(model="m"), playground=True, max_num_queued_tokens=CONTEXT)


def post(body: bytes, config: ServerConfig = PLAYED) -> httpx.Response:
    async def act(stage: Stage) -> httpx.Response:
        async with stage.http() as http:
            return await http.post("/playground/burst", content=body, headers=JSON)

    return on_stage(saying("a"), act, config)


def test_limits_are_checked_before_prompts_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("prompts were drawn for a call without room")

    monkeypatch.setattr(burst, "_job", never)
    answer = post(b'{"requests": [[600, 1], [600, 1]]}')
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "call_too_large")
    many = ServerConfig(EngineConfig(model="m"), playground=True, max_num_queued_reqs=0)
    answer = post(b'{"requests": [' + b",".join([b"[1, 1]"] * 65) + b"]}", many)
    assert answer.json()["error"]["code"] == "call_too_large"


def test_a_burst_runs() -> None:
    answer = post(b'{"requests": [[3, 1], [4, 1]]}')
    assert answer.status_code == 200 and answer.json()["requests"] == 2


@pytest.mark.parametrize(
    "body", [b'{"\xff": 1}', b'{"requests": [[1, 1]], "seed": "\xff"}', b"[" * 5000, b"{"]
)
def test_bytes_that_cannot_be_decoded_are_an_error_of_the_caller(body: bytes) -> None:
    answer = post(body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_burst")
