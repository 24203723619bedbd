"""Two replicas of the toy model in Ray Serve, started as a user starts them; one dies under load."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, TextIO

import httpx
import psutil
import pytest

from tests.serve.running import MODEL, parse_events, wait_until

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(300)]

START_SECONDS = 120
CALLERS = 8
TOKENS = 40
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


class Cluster:
    """The started command. `engines` are the engine processes of its replicas."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.http = httpx.Client(base_url=url, timeout=30)

    def engines(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "orca_jax.link.process" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    found.append(child)
        return found

    def starts(self, num_calls: int, **headers: str) -> set[float]:
        """The times of the starts of the ready engines that answer these calls."""
        bodies = self.bodies(num_calls, **headers)
        return {body["engine"]["start"]["total"] for body in bodies if "engine" in body}

    def bodies(self, num_calls: int, **headers: str) -> list[Any]:
        return [self.http.get("/ready", headers=headers).json() for _ in range(num_calls)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def started(*flags: str) -> Iterator[Cluster]:
    """Run the command until its replicas answer; afterwards check that none of its processes is left."""
    common = ("--model", MODEL, "--port", str(free_port()), "--no-log-requests", "--max-num-seqs", "4")
    log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", "orca_jax.deploy.ray_serve", *common, *flags],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    killer = threading.Timer(START_SECONDS, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        found = re.search(r"https?://\S+$", process.stdout.readline().strip())
        killer.cancel()
        assert found, f"the replicas did not start: {last_lines(log)}"
        cluster = Cluster(process, found[0])
        family = psutil.Process(process.pid).children(recursive=True)
        yield cluster
        process.terminate()
        assert process.wait(60) == 0
        _, left = psutil.wait_procs(family, timeout=20)
        assert not left, "processes are left"
        cluster.http.close()
    finally:
        killer.cancel()
        process.kill()
        process.communicate()
        log.close()


def last_lines(log: TextIO) -> str:
    log.seek(0)
    return "".join(log.readlines()[-20:])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started("--replicas", "2") as running:
        yield running


def test_the_application_is_the_servers(cluster: Cluster) -> None:
    whole = cluster.http.post("/v1/completions", json=BODY).json()
    assert whole["usage"]["completion_tokens"] == TOKENS
    with cluster.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        events = list(parse_events(response.iter_lines()))
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]
    wrong = cluster.http.post("/v1/completions", json={**BODY, "max_tokens": -7})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "max_tokens"
    assert len(wrong.headers.get_list("x-request-id")) == 1
    assert cluster.http.get("/health").json()["status"] == "ready"


def test_both_replicas_answer(cluster: Cluster) -> None:
    assert len(cluster.engines()) == 2
    assert len(cluster.starts(20)) == 2, "all calls went to one replica"


def outcome(http: httpx.Client, is_stream: bool, num_tokens: int = TOKENS) -> str:
    """Make one call: "whole" if its answer has all tokens, "error" if it ends with one. Anything else fails."""
    body = {**BODY, "stream": is_stream, "return_token_ids": True, "max_tokens": num_tokens}
    try:
        if not is_stream:
            answer = http.post("/v1/completions", json=body)
            if answer.status_code >= 500:
                return "error"
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == TOKENS
            return "whole"
        with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code >= 500:
                return "error"
            lines = [line for line in response.iter_lines() if line]
    except httpx.TransportError:
        return "error"
    if lines[-1:] != ["data: [DONE]"]:
        last = json.loads(lines[-1].removeprefix("data: ")) if lines else {"error": None}
        assert "error" in last, f"a stream ended without [DONE] and without an error: {lines[-1:]}"
        return "error"
    ids = [i for line in lines[:-1] for i in json.loads(line[6:])["choices"][0]["token_ids"]]
    assert len(ids) == num_tokens, "a stream has lost tokens"
    return "whole"


@pytest.mark.parametrize("victim", ["replica", "engine"])
def test_a_replica_dies_under_load(cluster: Cluster, victim: str) -> None:
    """Each call ends with its whole answer or with an error, and two replicas serve again."""
    wait_until(lambda: len(cluster.engines()) == 2, 60)
    before = cluster.engines()
    stop = threading.Event()
    results: list[tuple[float, str]] = []
    failures: list[BaseException] = []

    def work(number: int) -> None:
        with httpx.Client(base_url=cluster.http.base_url, timeout=30) as http:
            while not stop.is_set():
                try:
                    results.append((time.monotonic(), outcome(http, is_stream=bool(number % 2))))
                except BaseException as error:
                    failures.append(error)
                    return

    callers = [threading.Thread(target=work, args=(number,)) for number in range(CALLERS)]
    for caller in callers:
        caller.start()
    try:
        wait_until(lambda: len(results) > 4 * CALLERS, 60)
        process = before[0] if victim == "engine" else before[0].parent()
        assert process is not None
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: len(cluster.engines()) == 2 and before[0] not in cluster.engines(), 90)
        wait_until(lambda: len(cluster.starts(8)) == 2, 60)  # both answer
        mark = len(results)
        wait_until(lambda: len(results) > mark + 4 * CALLERS, 60)
    finally:
        stop.set()
        for caller in callers:
            caller.join(60)
    assert not failures, failures
    kinds = Counter(kind for _, kind in results)
    late = Counter(kind for _, kind in results[mark:])
    assert late["error"] == 0, f"calls still fail after the recovery: {late}"
    assert kinds["whole"] > 8 * CALLERS
    assert kinds["error"] < kinds["whole"], kinds


def test_replicas_follow_the_calls_and_sessions_stay() -> None:
    """The end is orderly, too: an open stream is finished."""
    last: list[str] = []
    with started("--max-replicas", "2", "--target-ongoing-requests", "1", "--routing", "session") as cluster:
        assert len(cluster.engines()) == 1
        stop = threading.Event()
        callers = [threading.Thread(target=keep_calling, args=(cluster.http, stop)) for _ in range(CALLERS)]
        for caller in callers:
            caller.start()
        try:
            wait_until(lambda: len(cluster.starts(8)) == 2, 120)
        finally:
            stop.set()
            for caller in callers:
                caller.join(60)
        for session in "abcd":
            assert len(cluster.starts(6, **{"x-session-id": session})) == 1
        stream = threading.Thread(target=lambda: last.append(outcome(cluster.http, is_stream=True, num_tokens=1500)))
        stream.start()
        wait_until(lambda: any(body["running"] for body in cluster.bodies(4)))
    stream.join(10)
    assert last == ["whole"]


def keep_calling(http: httpx.Client, stop: threading.Event) -> None:
    while not stop.is_set():
        http.post("/v1/completions", json={**BODY, "max_tokens": 400})
