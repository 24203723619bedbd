"""The engine process is killed or stopped: all clients get an error in seconds; `--restart-engine` restarts it."""

import json
import os
import signal
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.world import LONG, SEEDED, check_error, metrics, wait_calm
from tests.serve.running import Server, running, wait_until

SOON = 5.0


class Callers:
    """Open calls of every kind: streams, plain answers, several choices, and some in the queue."""

    def __init__(self, server: Server) -> None:
        self.ended: dict[str, tuple[float, dict[str, Any]]] = {}
        kinds: dict[str, dict[str, Any]] = {
            "stream": {"stream": True},
            "plain": {},
            "stream n": {"stream": True, "n": 2},
            "plain batch": {"prompt": ["a", "b"]},
            "queued stream": {"stream": True},
            "queued plain": {},
        }
        self.threads = [
            threading.Thread(target=self._call, args=(server, kind, fields)) for kind, fields in kinds.items()
        ]
        for thread in self.threads[:4]:
            thread.start()
        wait_until(lambda: metrics(server)["num_requests_running"] == 6, 10)
        for thread in self.threads[4:]:
            thread.start()
        wait_until(lambda: metrics(server)["num_requests_waiting"] == 2, 10)

    def _call(self, server: Server, kind: str, fields: dict[str, Any]) -> None:
        body = {"model": "preset:toy", "prompt": kind, **LONG, **fields}
        with httpx.Client(base_url=server.url, timeout=30) as client:
            response = client.post("/v1/completions", json=body)
        if not fields.get("stream") or response.status_code != 200:
            self.ended[kind] = time.monotonic(), check_error(response, 500, 503)
            return
        *_, last = [line for line in response.text.split("\n\n") if line]
        self.ended[kind] = time.monotonic(), json.loads(last.removeprefix("data: "))["error"]

    def check(self, start: float) -> None:
        """Check that all calls ended with an error soon after `start`."""
        for thread in self.threads:
            thread.join(30)
        assert len(self.ended) == 6
        for kind, (moment, error) in self.ended.items():
            assert moment - start < SOON, f"{kind} waited {moment - start:.1f} s"
            assert error.keys() == {"message", "type", "param", "code"} and error["type"] == "server_error", kind


def unhealthy(server: Server) -> bool:
    return server.health().status_code == 503


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
def test_all_calls_get_an_error(number: signal.Signals) -> None:
    with running("--max-num-seqs", "6") as server:
        engine = server.engine()
        callers = Callers(server)
        start = time.monotonic()
        os.kill(engine.pid, number)
        wait_until(lambda: unhealthy(server), SOON)
        assert server.http.get("/live").status_code == 200
        check_error(server.complete("late"), 503)
        callers.check(start)
        assert server.process.wait(15) not in (0, None)
        assert not psutil.pid_exists(engine.pid) or engine.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_it_comes_back(number: signal.Signals) -> None:
    with running("--max-num-seqs", "6", "--restart-engine") as server:
        said = server.complete("again", max_tokens=20, **SEEDED).json()["choices"]
        for _ in range(2):
            first = server.engine()
            callers = Callers(server)
            start = time.monotonic()
            os.kill(first.pid, number)
            wait_until(lambda: unhealthy(server), SOON)
            callers.check(start)
            wait_until(lambda: server.health().status_code == 200, 30)
            assert server.engine().pid != first.pid
            wait_until(lambda first=first: not psutil.pid_exists(first.pid), 10)
            assert server.complete("again", max_tokens=20, **SEEDED).json()["choices"] == said
            wait_calm(server)
        assert metrics(server)["engine_restarts_total"] == 2
        server.process.terminate()
        assert server.process.wait(15) == 0


def test_a_pause_shorter_than_the_limit_is_none() -> None:
    with running("--max-num-seqs", "6") as server, server.stream("x", max_tokens=2000, ignore_eos=True) as events:
        next(events)
        server.engine().suspend()
        time.sleep(1)
        server.engine().resume()
        *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        assert server.health().status_code == 200
