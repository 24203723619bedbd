"""The engine process is killed or stopped, and `--restart-engine` goes on with the open calls: a pause, and no more."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from lab.__main__ import main
from lab.restarts.calls import KINDS, Answer, Call, ask
from tests.chaos.world import LONG, SEEDED, check_error, expected_text, metrics, wait_calm
from tests.serve.running import Server, running, wait_until

TOKENS = 2000


def text_of(events: Any) -> str:
    """The text of the rest of a stream."""
    found = list(events)
    assert not [event for event in found if "error" in event], found[-1]
    return "".join(choice["text"] for event in found for choice in event["choices"])


def kill(server: Server, number: signal.Signals = signal.SIGKILL) -> None:
    engine = server.engine()
    os.kill(engine.pid, number)
    wait_until(lambda: not engine.is_running() or engine.status() == "zombie", 20)


def test_a_stream_goes_on_in_another_engine() -> None:
    with running("--restart-engine") as server:
        with server.stream("abc", max_tokens=TOKENS, ignore_eos=True, **SEEDED) as events:
            begin = next(events)["choices"][0]["text"]
            kill(server)
            wait_until(lambda: server.health().status_code == 503)
            assert server.health().json()["status"] == "restarting"
            error = check_error(server.complete("late"), 503)
            assert error["code"] == "engine_unavailable" and "started again" in error["message"]
            assert begin + text_of(events) == expected_text("abc", TOKENS)
        assert metrics(server)["engine_restarts_total"] == 1
        assert metrics(server)["generation_tokens_total"] == TOKENS
        server.wait_idle()


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_each_kind_of_call_goes_on(number: signal.Signals) -> None:
    """Twice, while all calls run; the second time the next engine ends too, while it loads."""
    calls = [Call(kind, 7, streams) for kind in KINDS for streams in (False, True)]
    with running("--restart-engine", "--max-num-batched-tokens", "128") as server:
        with httpx.Client(base_url=server.url, timeout=120) as http:
            expected = [ask(http, call).value for call in calls]
            for again in (False, True):
                with ThreadPoolExecutor(len(calls)) as threads:
                    found = [threads.submit(admitted, http, call) for call in calls]
                    wait_until(lambda: server.health().json()["running"] > len(calls) // 2)
                    kill(server, number)
                    if again:
                        wait_until(lambda: starting(server))
                        kill(server)
                    answers = [each.result() for each in found]
                for call, answer, value in zip(calls, answers, expected, strict=True):
                    assert answer.value == value, call
        wait_calm(server)


def admitted(http: httpx.Client, call: Call) -> Answer:
    """The answer to a call that may come while no engine serves."""
    while (answer := ask(http, call)).status == 503:
        time.sleep(0.1)
    return answer


def starting(server: Server) -> bool:
    """True if a process of the engine has started."""
    try:
        server.engine()
    except ValueError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.chaos
def test_prompts_go_on_before_their_first_token() -> None:
    """The engine is stopped before the calls come, so that none of them gets a token from it."""
    call = Call("long prompt", 7, streams=True)
    with running("--restart-engine", "--heartbeat-timeout", "60") as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            expected = ask(http, call).value
            server.engine().suspend()
            with ThreadPoolExecutor(3) as threads:
                found = [threads.submit(ask, http, call) for _ in range(3)]
                wait_until(lambda: server.http.get("/load").json()["server_load"] == 3)
                kill(server)
                assert [each.result().value for each in found] == [expected] * 3
        wait_calm(server)


@pytest.mark.slow
@pytest.mark.chaos
def test_a_client_that_goes_during_the_pause_leaves_nothing() -> None:
    with running("--restart-engine") as server:
        with server.stream("x", **LONG) as events:
            next(events)
            kill(server)
        wait_until(lambda: server.http.get("/load").json()["server_load"] == 0)
        server.wait_idle()
        wait_calm(server)


@pytest.mark.slow
@pytest.mark.chaos
def test_a_server_that_drains_goes_on() -> None:
    with running("--restart-engine", "--shutdown-timeout", "60") as server:
        with server.stream("abc", max_tokens=TOKENS, ignore_eos=True, **SEEDED) as events:
            begin = next(events)["choices"][0]["text"]
            server.process.terminate()
            wait_until(lambda: server.health().json()["status"] == "draining")
            kill(server)
            assert begin + text_of(events) == expected_text("abc", TOKENS)
        assert server.process.wait(30) == 0


@pytest.mark.slow
@pytest.mark.chaos
def test_pages_on_disk_are_read_by_the_next_engine(tmp_path: Any) -> None:
    """A call with a long prompt is interrupted, and its text goes on from pages that were saved before."""
    demo = "demo"
    with running(
        "--restart-engine", "--kv-disk", str(tmp_path), "--kv-disk-size", "64M", model=demo
    ) as server:
        body = {"model": demo, "prompt": "word " * 200, "max_tokens": 200, "ignore_eos": True}
        body |= {"temperature": 0}
        expected = server.http.post("/v1/completions", json=body).json()["choices"]
        found: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: found.append(server.http.post("/v1/completions", json=body))
        )
        wait_until(lambda: list(tmp_path.rglob("*.kv")))
        thread.start()
        wait_until(lambda: server.health().json()["running"] == 1)
        kill(server)
        thread.join()
        assert found[0].json()["choices"] == expected


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_the_soak_kills_engines(nodes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restarts", "--kills", "3", "--threads", "4", "--nodes", nodes]) == 0
    assert '"wrong": 0' in capsys.readouterr().out


def test_the_soak_refuses_no_kills(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restarts", "--kills", "0"]) == 2
    assert "kills and threads must be at least 1" in capsys.readouterr().err
