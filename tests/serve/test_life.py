"""Disconnects, the engine's death, signals, and starts that cannot succeed."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from orca_jax.serve.server import main
from tests.serve.running import MODEL, Server, parse_events, running, spawn, wait_until
from tests.serve.test_bad_input import check_error

LONG: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True}


def busy(server: Server) -> bool:
    return bool(server.health().json()["running"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["one", ["one", "two", "three"]])
def test_hanging_up_frees_the_engine(idle_server: Server, stream: bool, prompt: Any) -> None:
    body = {"model": MODEL, "prompt": prompt, "stream": stream, **LONG}
    with httpx.Client(base_url=idle_server.url, timeout=20) as http:
        request = http.build_request("POST", "/v1/completions", json=body)
        with socket.create_connection((request.url.host, request.url.port or 80)) as raw:
            head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
            raw.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + request.read())
            wait_until(lambda: busy(idle_server))
    start = time.monotonic()
    idle_server.wait_idle(timeout=3)
    assert time.monotonic() - start < 3 < 8, "8000 iterations of a millisecond would have taken longer"


def test_hanging_up_in_the_queue(idle_server: Server) -> None:
    """A request that waits for a row leaves as well."""
    with idle_server.stream(["x"] * 8, **LONG) as events:
        next(events)
        with idle_server.http.stream("POST", "/v1/completions", json={"model": MODEL, "prompt": "w", "stream": True}):
            wait_until(lambda: idle_server.health().json()["running"] == 8)
        wait_until(lambda: idle_server.health().json()["waiting"] == 0)


def open_connections(process: psutil.Process) -> list[Any]:
    return [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]


def test_only_the_http_port_listens(server: Server) -> None:
    (listening,) = open_connections(psutil.Process(server.process.pid))
    assert listening.laddr.port == server.http.base_url.port
    assert open_connections(server.engine()) == []


def test_killed_engine() -> None:
    with running() as server:
        waiting: list[httpx.Response] = []
        plain = threading.Thread(target=lambda: waiting.append(server.complete("plain", **LONG)))
        plain.start()
        with server.stream("streamed", **LONG) as events:
            next(events)
            wait_until(lambda: server.health().json()["running"] == 2)
            start = time.monotonic()
            os.kill(server.engine().pid, signal.SIGKILL)
            *_, last = events
            assert time.monotonic() - start < 5
            assert last["error"]["code"] == "engine_unavailable" and set(last["error"]) >= {"param", "type", "message"}
        assert server.health().status_code == 503
        plain.join()
        check_error(waiting[0], 503)
        check_error(server.complete("late"), 503)
        assert server.process.wait(10) == 1
    assert any("SIGKILL" in line for line in server.errors)


def test_engine_follows_a_killed_front_end() -> None:
    with running() as server:
        engine = server.engine()
        with server.stream("x", **LONG) as events:
            next(events)
            server.process.kill()
            with pytest.raises(httpx.TransportError):
                list(events)
        assert not psutil.wait_procs([engine], timeout=5)[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_everything_cleanly(number: signal.Signals) -> None:
    with running() as server:
        with server.stream("x", **LONG) as events:
            next(events)
            server.process.send_signal(number)
            *_, last = events
            assert "shutting down" in last["error"]["message"]
        assert server.process.wait(10) == 0
    assert server.errors == []


def test_signal_while_nobody_is_there() -> None:
    with running() as server:
        server.process.terminate()
        server.process.terminate()
        assert server.process.wait(10) == 0
    assert server.errors == []


def test_signal_while_the_engine_loads_and_hangs() -> None:
    """An engine that does not react is killed, and the wait for that has a limit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = spawn("--model", MODEL, "--port", str(port))
    try:
        server = psutil.Process(process.pid)
        wait_until(lambda: server.children())
        (engine,) = server.children()
        engine.suspend()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
            health = http.get("/health")
            assert (health.status_code, health.json()["status"]) == (503, "loading")
            early = http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
            assert check_error(early, 503)["code"] == "engine_unavailable" and early.headers["retry-after"]
            check_error(http.get("/v1/models"), 503)
        process.terminate()
        assert process.communicate(timeout=15) == ("", "") and process.returncode == 0
        assert not engine.is_running()
    finally:
        process.kill()
        process.communicate()


def test_front_end_needs_no_jax() -> None:
    code = "import sys, orca_jax.serve.server; assert not {'jax', 'numpy', 'orca_jax.build'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def fails(*flags: str) -> str:
    """What a start that cannot succeed says on standard error, with code 2 and nothing else."""
    process = spawn(*flags)
    try:
        out, errors = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert (process.returncode, out) == (2, ""), errors
    assert "Traceback" not in errors
    return errors


def test_port_taken(server: Server) -> None:
    errors = fails("--model", MODEL, "--port", str(server.http.base_url.port))
    assert re.fullmatch(r"error: --port: port \d+ on 127\.0\.0\.1 is taken; .*\n", errors)


def test_wrong_settings_name_their_flag(tmp_path: Path) -> None:
    port = ("--port", "0")
    assert fails("--model", str(tmp_path / "missing"), *port).startswith("error: --model: ")
    errors = fails("--model", MODEL, "--tokenizer", str(tmp_path), *port)
    assert errors.startswith("error: --tokenizer: no tokenizer.json")


@pytest.mark.parametrize("host", ["256.1.1.1", "192.0.2.1"])
def test_wrong_hosts_name_their_flag(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", MODEL, "--host", host, "--port", "0"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: --host: ") and output.err.count("\n") == 1 and output.out == ""


@pytest.mark.parametrize(
    "wrong", ["--scheduler=fast", "--unknown=1", "--port=70000", "--max-model-len=4q", "--mod=preset:toy"]
)
def test_wrong_flags_are_named(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([wrong])
    assert caught.value.code == 2 and wrong.partition("=")[0] in capsys.readouterr().err


def test_stream_parser_notices_a_cut_stream() -> None:
    """The helper that all tests above lean on."""
    with pytest.raises(AssertionError, match="without"):
        list(parse_events(iter(['data: {"choices": []}', ""])))
