"""The command of Ray Serve as a user starts it, and callers for it."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, Self, TextIO

import httpx
import psutil

from tests.serve.running import MODEL, wait_until

START_SECONDS = 120
CALLERS = 8
TOKENS = 40
BODY = {"model": MODEL, "prompt": "hi", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


class Cluster:
    """The started command. `engines` are the engine processes of its replicas, `ranks` the actors of their workers."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.http = httpx.Client(base_url=url, timeout=30)

    def engines(self) -> list[psutil.Process]:
        return self._running("orca_jax.link.process")

    def ranks(self) -> list[psutil.Process]:
        return self._running("ray::Rank")

    def _running(self, name: str) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if name in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
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
    common = (
        "--model",
        MODEL,
        "--port",
        str(free_port()),
        "--no-log-requests",
        "--max-num-seqs",
        "4",
    )
    log = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", "orca_jax.tools.deploy.ray_serve", *common, *flags],
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


def outcome(http: httpx.Client, is_stream: bool, num_tokens: int = TOKENS) -> str:
    """Make one call: "whole" if its answer has all tokens, "error" if it ends with one. Anything else fails."""
    body = {**BODY, "stream": is_stream, "return_token_ids": True, "max_tokens": num_tokens}
    try:
        if not is_stream:
            answer = http.post("/v1/completions", json=body)
            if answer.status_code >= 500:
                return "error"
            assert (
                answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == TOKENS
            )
            return "whole"
        with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code >= 500:
                return "error"
            lines = [line for line in response.iter_lines() if line]
    except httpx.TimeoutException:  # it did not end
        raise
    except httpx.TransportError:
        return "error"
    if lines[-1:] != ["data: [DONE]"]:
        last = json.loads(lines[-1].removeprefix("data: ")) if lines else {"error": None}
        assert "error" in last, f"a stream ended without [DONE] and without an error: {lines[-1:]}"
        return "error"
    ids = [i for line in lines[:-1] for i in json.loads(line[6:])["choices"][0]["token_ids"]]
    assert len(ids) == num_tokens, "a stream has lost tokens"
    return "whole"


class Load:
    """Callers that call without pause. `results` are the outcomes of their calls, `failures` what must not happen."""

    def __init__(self, cluster: Cluster) -> None:
        self.results: list[str] = []
        self.failures: list[BaseException] = []
        self._url = cluster.http.base_url
        self._stop = threading.Event()
        self._callers = [
            threading.Thread(target=self._work, args=(number,)) for number in range(CALLERS)
        ]

    def __enter__(self) -> Self:
        for caller in self._callers:
            caller.start()
        self.await_more()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for caller in self._callers:
            caller.join(90)

    def await_more(self) -> int:
        """Wait for many more calls to end; return the number of those before."""
        mark = len(self.results)
        wait_until(lambda: self.failures or len(self.results) > mark + 4 * CALLERS, 60)
        return mark

    def kinds(self, begin: int = 0) -> Counter[str]:
        """The numbers of whole answers and of errors from a call on."""
        assert not self.failures, self.failures
        return Counter(self.results[begin:])

    def _work(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._stop.is_set():
                try:
                    self.results.append(outcome(http, is_stream=bool(number % 2)))
                except BaseException as error:
                    self.failures.append(error)
                    return
