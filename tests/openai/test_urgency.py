"""How soon a call is served: what the engine is told of its priority, of who sent it, and of its deadline."""

import threading
from typing import Any

import pytest

from orca_jax.serve.openapi import openapi_document
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import MAX_PRIORITY, Urgency
from tests.openai.test_bad_input import check_error
from tests.serve.played import Stage, call, on_stage, saying
from tests.serve.running import Server, running, wait_until

PATHS = ("/v1/completions", "/v1/chat/completions")
READING = ServerConfig(EngineConfig(model="m", scheduler="tests.policy.turns:Reading"))
BY_PRIORITY = EngineConfig(model="m", scheduler="chunked", scheduling_policy="priority")


def told(path: str, config: ServerConfig | None = None, **fields: Any) -> Urgency:
    answer, link = call(saying("x"), path, config, **fields)
    assert answer.status_code == 200, answer.text
    return link.submitted[-1].urgency


@pytest.mark.conforms("completions.priority", "chat.priority")
@pytest.mark.parametrize("path", PATHS)
def test_priority_reaches_the_engine(path: str) -> None:
    config = ServerConfig(BY_PRIORITY)
    for priority in (-MAX_PRIORITY, -1, 0, MAX_PRIORITY):
        assert told(path, config, priority=priority).priority == priority
    assert told(path, config, priority=None).priority == 0
    for priority in (-MAX_PRIORITY - 1, MAX_PRIORITY + 1, 2**70, 0.5, "0", True):
        answer, link = call(saying("x"), path, config, priority=priority)
        assert check_error(answer, 400)["param"] == "priority" and not link.submitted, priority


@pytest.mark.conforms("completions.priority", "chat.priority")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("policy", ["fcfs", "fair", "deadline"])
def test_priority_is_refused_where_nobody_looks_at_it(path: str, policy: Any) -> None:
    config = ServerConfig(EngineConfig(model="m", scheduler="chunked", scheduling_policy=policy))
    assert told(path, config, priority=0) == Urgency()
    answer, link = call(saying("x"), path, config, priority=1)
    error = check_error(answer, 400)
    assert (error["param"], error["code"]) == ("priority", "unsupported_parameter")
    assert "--scheduling-policy priority" in error["message"] and not link.submitted


@pytest.mark.parametrize("kind", ["CompletionRequest", "ChatRequest"])
def test_the_document_says_whether_anybody_looks_at_it(kind: str) -> None:
    for takes_priority in (True, False):
        document = openapi_document(["m"], {}, has_keys=False, takes_priority=takes_priority)
        field = document["components"]["schemas"][kind]["properties"]["priority"]
        assert field.get("enum") == (None if takes_priority else [0, None])


@pytest.mark.conforms("completions.user", "chat.user")
@pytest.mark.parametrize("path", PATHS)
def test_without_keys_the_user_is_the_tenant(path: str) -> None:
    assert [told(path, user=user).tenant for user in ("ann", "", None)] == ["ann", "", ""]
    answer, link = call(saying("x"), path, user="x" * 1025)
    assert check_error(answer, 400)["param"] == "user" and not link.submitted


@pytest.mark.conforms("completions.user", "chat.user")
def test_with_keys_the_key_is_the_tenant_whatever_the_user_says() -> None:
    keys = ("sk-first", "sk-second")
    asked = [(keys[0], "ann"), (keys[0], "bob"), (keys[1], "ann"), (keys[1], None)]

    async def act(stage: Stage) -> list[str]:
        async with stage.http() as http:
            for key, user in asked:
                body = {"model": "m", "prompt": "x", "user": user}
                headers = {"authorization": f"Bearer {key}"}
                assert (
                    await http.post("/v1/completions", json=body, headers=headers)
                ).status_code == 200
        return [submit.urgency.tenant for submit in stage.link.submitted]

    one, same, other, same_other = on_stage(
        saying("x"), act, ServerConfig(EngineConfig(model="m"), api_key=keys)
    )
    assert one == same != other == same_other
    assert not any(key in tenant for key in keys for tenant in (one, other)), (
        "what is told and logged is no secret"
    )


@pytest.mark.conforms("completions.vllm_xargs", "chat.vllm_xargs")
@pytest.mark.parametrize("path", PATHS)
def test_hints_reach_the_scheduler(path: str) -> None:
    hints = {"program": "agent-7", "weight": 2, "ttft": 0.5, "tpot": 0.1}
    assert told(path, READING, vllm_xargs=hints) == Urgency(
        program="agent-7", weight=2.0, ttft=0.5, tpot=0.1
    )
    for nothing in (None, {}, {"program": "", "weight": 1, "ttft": None}):
        assert told(path, vllm_xargs=nothing) == Urgency()
    for wrong in ({"weight": 0}, {"ttft": -1}, {"program": 3}, {"other": 1}, []):
        answer, link = call(saying("x"), path, vllm_xargs=wrong)
        assert (
            str(check_error(answer, 400)["param"]).startswith("vllm_xargs") and not link.submitted
        ), wrong


@pytest.mark.conforms("completions.vllm_xargs", "chat.vllm_xargs")
@pytest.mark.parametrize("path", PATHS)
def test_what_nothing_reads_is_refused_by_name(path: str) -> None:
    """The class decides: one that reads the priority gets it, and one that names a hint gets no other one."""
    program = EngineConfig(model="m", scheduling_policy="tests.policy.turns:ByProgram")
    assert told(path, READING, priority=3).priority == 3
    assert told(path, ServerConfig(program), vllm_xargs={"program": "p"}).program == "p"
    untold = EngineConfig(model="m", scheduling_policy="tests.policy.turns:ByTenant")
    hints = {"program": "p", "weight": 2, "ttft": 0.5, "tpot": 0.1}
    assert told(path, ServerConfig(untold), priority=3, vllm_xargs=hints).ttft == 0.5
    for name, value in hints.items():
        for engine in (BY_PRIORITY, program):
            if engine is program and name == "program":
                continue
            answer, link = call(saying("x"), path, ServerConfig(engine), vllm_xargs={name: value})
            error = check_error(answer, 400)
            found = error["param"], error["code"]
            assert found == (f"vllm_xargs.{name}", "unsupported_parameter"), name
            assert not link.submitted
    answer, _ = call(saying("x"), path, ServerConfig(program), priority=1)
    assert check_error(answer, 400)["param"] == "priority"


@pytest.mark.conforms("completions.timeout", "chat.timeout")
@pytest.mark.parametrize("path", PATHS)
def test_the_deadline_is_the_stricter_of_the_calls_and_the_servers(path: str) -> None:
    limited = ServerConfig(EngineConfig(model="m"), request_timeout=60.0)
    assert told(path).deadline is None
    assert told(path, timeout=5).deadline == 5
    assert [
        told(path, limited, **fields).deadline for fields in ({}, {"timeout": 5}, {"timeout": 90})
    ] == [60, 5, 60]


def test_the_urgent_one_is_served_first() -> None:
    """One row, which is taken: of the two that wait, the later and more urgent one gets it."""
    ended: list[str] = []

    def ask(server: Server, name: str, priority: int) -> None:
        assert (
            server.complete("x", max_tokens=20, ignore_eos=True, priority=priority).status_code
            == 200
        )
        ended.append(name)

    flags = ("--scheduler", "chunked", "--scheduling-policy", "priority", "--max-num-seqs", "1")
    with running(*flags, "--max-model-len", "8192") as server:
        with server.stream("long", max_tokens=8000, ignore_eos=True) as events:
            next(events)
            threads = []
            for number, (name, priority) in enumerate(
                (("usual", 0), ("patient", 5), ("urgent", -5)), start=1
            ):
                threads.append(threading.Thread(target=ask, args=(server, name, priority)))
                threads[-1].start()
                wait_until(
                    lambda number=number: ended or server.health().json()["waiting"] == number
                )
                assert not ended, "the long one was too short"
        for thread in threads:
            thread.join()
    assert ended == ["urgent", "usual", "patient"]
