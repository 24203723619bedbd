"""A real server in its own processes, with the toy model and a free port."""

import contextlib
import json
import os
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

MODEL = "preset:toy"
VOCAB_SIZE = 257
EOS = 256


# Logged at every start: progress without a terminal, the engine's line, and the format of tool calls of the demo.
AT_START = ("loading and compiling ", "; ready after ", "tool calls are read as ")


def unexpected(lines: Iterable[str]) -> Iterator[str]:
    """Lines of a server's standard error beside those of every start."""
    return (line for line in lines if not any(known in line for known in AT_START))


@dataclass
class Server:
    """A started server. `lines` holds its output so far."""

    process: subprocess.Popen[str]
    http: httpx.Client
    lines: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        """Call `POST /v1/completions`."""
        return self.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, **fields})

    @contextlib.contextmanager
    def stream(self, prompt: Any = "hi", **fields: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The parsed events of a stream, without the final `[DONE]`, which only a stream with an error may lack."""
        body = {"model": MODEL, "prompt": prompt, "stream": True, **fields}
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            yield parse_events(response.iter_lines())

    def health(self) -> httpx.Response:
        return self.http.get("/health")

    def wait_idle(self, timeout: float = 60.0) -> None:
        """Wait until the engine reports no request."""
        wait_until(
            lambda: self.health().json() == {"status": "ready", "running": 0, "waiting": 0}, timeout
        )

    def engine(self) -> psutil.Process:
        """The engine process; it changes when the server restarts the engine."""
        return engine_of(self.process.pid)


def parse_events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Parse server-sent events, and check OpenAI's framing. A comment, as a busy server sends one, is no event."""
    for line in lines:
        if line in ("", ": keep-alive"):
            continue
        assert line.startswith("data: "), line
        if line == "data: [DONE]":
            assert not [rest for rest in lines if rest]
            return
        event = json.loads(line.removeprefix("data: "))
        yield event
        if "error" in event:
            assert not [rest for rest in lines if rest]
            return
    raise AssertionError("the stream ended without [DONE] or an error")


def wait_until(holds: Any, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)


def engine_of(pid: int) -> psutil.Process:
    """The engine process of a server."""
    (engine,) = engines_of(pid)
    return engine


def engines_of(pid: int) -> list[psutil.Process]:
    """The child processes of the engine: one while it runs."""
    children = psutil.Process(pid).children()
    return [child for child in children if is_engine(child)]


def is_engine(child: psutil.Process) -> bool:
    """True for a process of the engine that has not ended."""
    try:
        return "orca_jax.link.process" in child.cmdline()
    except psutil.NoSuchProcess:  # a zombie too
        return False


def spawn(
    *flags: str, open_files: int | None = None, prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Start `python -m orca_jax.serve`, with this limit of open files, behind the words of another command."""
    limit = [] if open_files is None else ["sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh"]
    return subprocess.Popen(
        [*prefix, *limit, sys.executable, "-m", "orca_jax.serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("COV_")},
    )


@contextlib.contextmanager
def running(
    *flags: str,
    model: str = MODEL,
    uds: Path | None = None,
    tls: ssl.SSLContext | None = None,
    api_key: str | None = None,
    open_files: int | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[Server]:
    """Start a server and wait until it is ready; afterwards check that none of its processes is left.

    Args:
        flags: flags of the server; they override the ones added here.
        model: the model to serve.
        uds: Unix socket to listen on instead of a free port.
        tls: for clients of a server with a certificate in `flags`.
        api_key: one of the keys in `flags`, for `Server.http`.
        open_files: limit of open files.
        prefix: words of another command, which runs the server.
    """
    place = ("--uds", str(uds)) if uds is not None else ("--port", "0")
    process = spawn(
        "--model", model, *place, "--no-log-requests", *flags, open_files=open_files, prefix=prefix
    )
    assert process.stdout is not None and process.stderr is not None
    family: list[psutil.Process] = []
    try:
        lines = [process.stdout.readline().rstrip("\n")]
        found = re.search(r"https?://\S+$", lines[0])
        assert found, f"the server did not start: {process.stderr.read()}"
        lines.append(process.stdout.readline().rstrip("\n"))
        family = psutil.Process(process.pid).children(recursive=True)
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        transport = httpx.HTTPTransport(
            uds=None if uds is None else str(uds), verify=tls if tls is not None else True
        )
        with httpx.Client(
            base_url=found[0], timeout=60, headers=headers, transport=transport
        ) as http:
            server = Server(process, http, lines)
            drain = threading.Thread(
                target=lambda: server.errors.extend(unexpected(process.stderr or ()))
            )
            drain.start()
            yield server
            family += (
                psutil.Process(process.pid).children(recursive=True)
                if process.poll() is None
                else []
            )
            if process.poll() is None:
                process.terminate()
            process.wait(60)
            drain.join(60)
            assert not any("Traceback" in line for line in server.errors), "".join(server.errors)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            stream.close()
    _, left = psutil.wait_procs(family, timeout=60)
    assert not left, "a process of the server is left"
