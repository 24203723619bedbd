"""SIGTERM while idle, loading, compiling or busy, and twice: the process ends in time with code 0; calls get errors."""

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.chaos.world import LONG, SEEDED, check_error, expected_text
from tests.serve.running import MODEL, engine_of, engines_of, running, spawn, wait_until


def test_idle() -> None:
    with running() as server:
        start = time.monotonic()
        server.process.terminate()
        assert server.process.wait(10) == 0
        assert time.monotonic() - start < 5
    assert "Traceback" not in "".join(server.errors)


def test_busy_drains() -> None:
    """The server is not ready from then on and refuses new calls; the running call finishes."""
    with running("--shutdown-timeout", "30") as server:
        with server.stream("drain", max_tokens=3000, ignore_eos=True, **SEEDED) as events:
            texts = [next(events)["choices"][0]["text"]]
            server.process.terminate()
            with httpx.Client(base_url=server.url, timeout=10) as late:
                wait_until(lambda: _refuses(late))
            texts += [event["choices"][0]["text"] for event in events]
        assert "".join(texts) == expected_text("drain", 3000)
        assert server.process.wait(10) == 0


def test_busy_beyond_the_limit() -> None:
    with running("--shutdown-timeout", "1", "--max-num-seqs", "2") as server:
        with (
            server.stream(["a", "b"], **LONG) as events,
            httpx.Client(base_url=server.url, timeout=20) as other,
        ):
            next(events)
            start = time.monotonic()
            server.process.terminate()
            *_, last = events
            assert last["error"]["type"] == "server_error" and time.monotonic() - start < 5
            del other
        assert server.process.wait(10) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_twice_ends_now(second: signal.Signals) -> None:
    with running("--shutdown-timeout", "60") as server:
        with server.stream("x", **LONG) as events:
            next(events)
            server.process.terminate()
            time.sleep(0.3)
            start = time.monotonic()
            server.process.send_signal(second)
            *_, last = events
            assert "error" in last
        server.process.wait(10)
        assert time.monotonic() - start < 5


def test_with_a_client_that_never_reads() -> None:
    """The client does not read its answer, and the server still ends."""
    with running("--shutdown-timeout", "1") as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((server.http.base_url.host, server.http.base_url.port))
        body = b'{"model": "preset:toy", "prompt": "x", "max_tokens": 8000, "ignore_eos": true, "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        deaf.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: server.health().json()["running"] == 1)
        server.process.terminate()
        assert server.process.wait(15) == 0


@contextmanager
def starting(*flags: str) -> Iterator[tuple[psutil.Process, httpx.Client]]:
    """Start a server that is not ready yet; yield it with its HTTP port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = spawn("--port", str(port), *flags)
    server = psutil.Process(process.pid)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            wait_until(lambda: _answers(client), 20)
            yield server, client
        wait_until(lambda: process.poll() is not None, 15)
        out, errors = process.communicate()
        assert process.returncode == 0 and out == "" and "Traceback" not in errors, errors
    finally:
        family = server.children(recursive=True) if server.is_running() else []
        for left in (*family, process):
            left.kill()
        process.communicate()


def test_loading() -> None:
    """The engine process is stopped and does not respond."""
    with starting("--model", MODEL) as (server, client):
        wait_until(lambda: engines_of(server.pid))
        engine = engine_of(server.pid)
        engine.suspend()
        health = client.get("/health")
        if health.status_code == 503:  # otherwise it was faster
            assert health.json()["status"] in ("loading", "hung")
        assert client.get("/live").status_code == 200
        server.terminate()
    assert not engine.is_running()


def test_compiling(tmp_path: Path) -> None:
    """The cache of programs is empty, so the engine's main thread is in XLA and reads no messages."""
    with starting("--model", "demo", "--compile-cache", str(tmp_path)) as (server, client):
        wait_until(lambda: client.get("/health").json()["status"] == "compiling", 60)
        check_error(client.post("/v1/completions", json={"model": "demo", "prompt": "x"}), 503)
        engine = engine_of(server.pid)
        server.terminate()
    assert not engine.is_running()


def _refuses(client: httpx.Client) -> bool:
    """True if a draining server refuses calls, by its answer or by a closed port."""
    try:
        health = client.get("/health")
        late = client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
    except httpx.TransportError:
        return True
    if health.status_code != 503:
        return False
    check_error(late, 503)
    return True


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/live").status_code == 200
    except httpx.TransportError:
        return False
