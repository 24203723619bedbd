"""The engine process is killed or stopped: all clients get an error in seconds, without `--restart-engine`."""

import json
import os
import signal
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

from tests.chaos.world import APIS, ERROR_KEYS, call_of, check_error, metrics
from tests.serve.running import Server, running, wait_until

SOON = 5.0
ROWS = 12
OTHERS = tuple(path for path in APIS if path != "/v1/completions")


class Callers:
    """Open calls of every kind: streams, plain answers, several choices, and some in the queue."""

    def __init__(self, server: Server) -> None:
        self.ended: dict[str, tuple[float, dict[str, Any]]] = {}
        kinds: dict[str, dict[str, Any]] = {
            "stream": {"stream": True},
            "plain": {},
            "stream n": {"stream": True, "n": 2},
            "plain batch": {"prompt": ["a", "b"]},
            **{
                f"{end} {path}": {"stream": end == "stream"}
                for path in OTHERS
                for end in ("stream", "plain")
            },
            "queued stream": {"stream": True},
            "queued plain": {},
        }
        self.threads = [
            threading.Thread(target=self._call, args=(server, kind, fields))
            for kind, fields in kinds.items()
        ]
        for thread in self.threads[:-2]:
            thread.start()
        wait_until(lambda: metrics(server)["num_requests_running"] == ROWS, 10)
        for thread in self.threads[-2:]:
            thread.start()
        wait_until(lambda: metrics(server)["num_requests_waiting"] == 2, 10)

    def _call(self, server: Server, kind: str, fields: dict[str, Any]) -> None:
        path = kind.rpartition(" ")[2] if "/" in kind else "/v1/completions"
        with httpx.Client(base_url=server.url, timeout=30) as client:
            response = client.post(path, json={"model": "preset:toy", **call_of(path, **fields)})
        if not fields.get("stream") or response.status_code != 200:
            self.ended[kind] = time.monotonic(), check_error(response, 500, 503)
            return
        *_, last = [line for line in response.text.split("\n\n") if line]
        value = json.loads(last.rpartition("data: ")[2])
        self.ended[kind] = time.monotonic(), value.get("response", value)["error"]

    def check(self, start: float) -> None:
        """Check that all calls ended with an error soon after `start`."""
        for thread in self.threads:
            thread.join(30)
        assert len(self.ended) == len(self.threads)
        for kind, (moment, error) in self.ended.items():
            assert moment - start < SOON, f"{kind} waited {moment - start:.1f} s"
            assert error["message"], kind
            if kind == "stream /v1/messages":
                assert error.keys() == {"type", "message"} and error["type"] in (
                    "api_error",
                    "overloaded_error",
                ), error
            elif kind == "stream /v1/responses":
                assert error.keys() == {"code", "message"} and error["code"] == "server_error", (
                    error
                )
            elif kind != "plain /v1/messages":
                assert error.keys() == ERROR_KEYS and error["type"] == "server_error", kind


def unhealthy(server: Server) -> bool:
    return server.health().status_code == 503


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
def test_all_calls_get_an_error(number: signal.Signals) -> None:
    with running("--max-num-seqs", str(ROWS)) as server:
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


def test_a_pause_shorter_than_the_limit_is_none() -> None:
    with (
        running("--max-num-seqs", str(ROWS)) as server,
        server.stream("x", max_tokens=2000, ignore_eos=True) as events,
    ):
        next(events)
        server.engine().suspend()
        time.sleep(1)
        server.engine().resume()
        *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        assert server.health().status_code == 200
