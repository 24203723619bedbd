"""Disconnects, the engine's death, signals, and starts that cannot succeed."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from orca_jax.helpers.bundled import demo_directory
from orca_jax.serve.__main__ import main
from orca_jax.server_config import ServerConfig
from tests.openai.test_bad_input import check_error
from tests.serve.running import (
    MODEL,
    Server,
    engine_of,
    engines_of,
    parse_events,
    running,
    spawn,
    wait_until,
)

LONG: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True}


heavy = (pytest.mark.slow, pytest.mark.chaos)


def busy(server: Server) -> bool:
    return bool(server.health().json()["running"])


def iterations(server: Server) -> float:
    """The engine's iterations so far, in its last message."""
    (total,) = re.findall(
        r"^orca_jax_iterations_total\S* (\S+)$", server.http.get("/metrics").text, re.MULTILINE
    )
    return float(total)


@contextlib.contextmanager
def asking(server: Server, **body: Any) -> Iterator[socket.socket]:
    """A connection with an open completion; it hangs up at the end of the block."""
    url = server.http.base_url
    request = httpx.Request("POST", f"{server.url}/v1/completions", json={"model": MODEL, **body})
    with socket.create_connection((url.host, url.port or 80)) as raw:
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        raw.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode() + request.read())
        yield raw


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["one", ["one", "two", "three"]])
def test_hanging_up_frees_the_engine(idle_server: Server, stream: bool, prompt: Any) -> None:
    before = iterations(idle_server)
    with asking(idle_server, prompt=prompt, stream=stream, **LONG):
        wait_until(lambda: busy(idle_server))
    idle_server.wait_idle()
    assert iterations(idle_server) - before < 7000, "8000, but for the end of the connection"


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_in_the_queue(idle_server: Server, stream: bool) -> None:
    """A request waiting for a row is removed as well."""

    def counts() -> tuple[int, int]:
        health = idle_server.health().json()
        return health["running"], health["waiting"]

    with asking(idle_server, prompt=["x"] * 8, **LONG):
        wait_until(lambda: counts() == (8, 0))
        with asking(idle_server, prompt="w", stream=stream):
            wait_until(lambda: counts() == (8, 1))
        wait_until(lambda: counts() == (8, 0))


def open_connections(process: psutil.Process) -> list[Any]:
    return [c for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]


def test_only_the_http_port_listens(server: Server) -> None:
    front_end = psutil.Process(server.process.pid)
    (listening,) = open_connections(front_end)
    assert listening.laddr.port == server.http.base_url.port
    assert server.engine() in front_end.children()
    for child in front_end.children(recursive=True):
        assert open_connections(child) == [], (
            "the processes communicate over inherited socket pairs"
        )


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=heavy)])
def test_engine_killed_or_stopped(number: signal.Signals) -> None:
    """Open calls and later ones get an error, after a stop within five seconds."""
    with running() as server:
        waiting: list[httpx.Response] = []
        plain = threading.Thread(target=lambda: waiting.append(server.complete("plain", **LONG)))
        plain.start()
        with server.stream("streamed", **LONG) as events:
            next(events)
            wait_until(lambda: server.health().json()["running"] == 2)
            start = time.monotonic()
            os.kill(server.engine().pid, number)
            *_, last = events
            assert last["error"]["code"] == "engine_unavailable" and set(last["error"]) >= {
                "param",
                "type",
                "message",
            }
        health = server.health()
        assert number == signal.SIGKILL or time.monotonic() - start < 5
        assert health.status_code == 503
        assert health.json()["status"] == ("dead" if number == signal.SIGKILL else "hung")
        plain.join()
        check_error(waiting[0], 503)
        check_error(server.complete("late"), 503)
        assert server.process.wait(60) == 1
    word = "SIGKILL" if number == signal.SIGKILL else "no heartbeat"
    assert any(word in line for line in server.errors)


@pytest.mark.slow
@pytest.mark.chaos
def test_a_front_end_that_was_stopped_does_not_blame_the_engine() -> None:
    with running() as server:
        with server.stream("x", max_tokens=3000, ignore_eos=True) as events:
            next(events)
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(5)
            server.process.send_signal(signal.SIGCONT)
            *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        server.wait_idle()


@pytest.mark.slow
@pytest.mark.chaos
def test_signal_while_the_engine_compiles() -> None:
    with started("--model", "demo", "--no-progress", "--compile-cache", "none") as (process, http):
        wait_until(lambda: status(http) == "compiling")
        engine = engine_of(process.pid)
        assert http.get("/live").status_code == 200 and http.get("/ready").status_code == 503
        process.terminate()
        out, errors = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "") and "Traceback" not in errors
        assert not engine.is_running()


def status(http: httpx.Client) -> str:
    with contextlib.suppress(httpx.ConnectError):
        return str(http.get("/health").json()["status"])
    return "unreachable"


@pytest.mark.slow
def test_engine_follows_a_killed_front_end() -> None:
    with running() as server:
        engine = server.engine()
        with server.stream("x", **LONG) as events:
            next(events)
            server.process.kill()
            with pytest.raises(httpx.TransportError):
                list(events)
        assert not psutil.wait_procs([engine], timeout=60)[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=heavy)])
def test_signal_lets_running_requests_finish(number: signal.Signals) -> None:
    with running() as server:
        with server.stream("x", max_tokens=3000, ignore_eos=True) as events:
            next(events)
            server.engine().terminate()  # as for a whole process group: the engine ignores it
            server.process.send_signal(number)
            wait_until(lambda: server.health().json()["status"] == "draining")
            assert (server.health().status_code, server.http.get("/ready").status_code) == (
                503,
                503,
            )
            assert server.http.get("/live").status_code == 200
            refused = server.complete("late")
            assert (
                check_error(refused, 503)["code"] == "engine_unavailable"
                and refused.headers["retry-after"]
            )
            *_, last = events
            assert last["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0
    assert server.errors == []


@pytest.mark.slow
@pytest.mark.chaos
def test_signal_with_a_limit_on_patience() -> None:
    with running("--shutdown-timeout", "0.5") as server:
        with server.stream("x", **LONG) as events:
            next(events)
            server.process.terminate()
            *_, last = events
            assert (
                "shutting down" in last["error"]["message"]
                and last["error"]["type"] == "server_error"
            )
        assert server.process.wait(60) == 0
    assert server.errors == []


@pytest.mark.slow
def test_second_signal_ends_at_once() -> None:
    with running() as server:
        answers: list[httpx.Response] = []
        plain = threading.Thread(target=lambda: answers.append(server.complete("plain", **LONG)))
        plain.start()
        with server.stream("x", **LONG) as events:
            next(events)
            wait_until(lambda: server.health().json()["running"] == 2)
            server.process.terminate()
            wait_until(lambda: server.health().json()["status"] == "draining")
            server.process.terminate()
            *_, last = events
            assert "shutting down" in last["error"]["message"], (
                "they would end without an error, but later"
            )
        plain.join()
        check_error(answers[0], 503)
        assert server.process.wait(60) == 0
    assert server.errors == []


@pytest.mark.slow
def test_signal_without_open_calls() -> None:
    with running() as server:
        assert server.health().status_code == 200  # on a connection that the client keeps
        server.process.terminate()
        server.process.terminate()
        assert server.process.wait(ServerConfig().shutdown_timeout) == 0, (
            "it waits for no connection"
        )
    assert server.errors == []


@contextlib.contextmanager
def started(*flags: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Start a server without waiting for it to be ready; yield it and a client."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = spawn("--port", str(port), "--no-log-requests", *flags)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            yield process, http
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def hanging_while_it_loads(*flags: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Start a server and stop its engine before the engine has loaded."""
    with started("--model", MODEL, *flags) as (process, http):
        wait_until(lambda: engines_of(process.pid))
        engine = engine_of(process.pid)
        engine.suspend()
        yield process, http
        assert not engine.is_running()


@pytest.mark.slow
@pytest.mark.chaos
def test_signal_while_the_engine_loads_and_hangs() -> None:
    """An engine that does not react is killed after a limited wait."""
    with hanging_while_it_loads() as (process, http):
        health = http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        assert http.get("/live").status_code == 200
        early = http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert (
            check_error(early, 503)["code"] == "engine_unavailable" and early.headers["retry-after"]
        )
        check_error(http.get("/v1/models"), 503)
        process.terminate()
        assert process.communicate(timeout=60) == ("", "") and process.returncode == 0


@pytest.mark.slow
def test_loading_has_a_limit() -> None:
    with hanging_while_it_loads("--load-timeout", "1") as (process, _):
        out, errors = process.communicate(timeout=60)
        assert (process.returncode, out) == (1, "")
        assert errors == "error: the engine did not load within 1 s (--load-timeout)\n"


def test_front_end_needs_no_jax() -> None:
    unwanted = {"jax", "numpy", "orca_jax.assembly.engine"}
    code = f"import sys, orca_jax.serve.server; assert not {unwanted} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def fails(*flags: str) -> str:
    """The standard error of a start that must fail with code 2, and without other output."""
    process = spawn(*flags)
    try:
        out, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert (process.returncode, out) == (2, ""), errors
    assert "Traceback" not in errors
    return errors


def test_port_taken(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", MODEL, "--port", str(server.http.base_url.port)]) == 2
    errors = capsys.readouterr().err
    assert re.fullmatch(r"error: --port: port \d+ on 127\.0\.0\.1 is already in use; .*\n", errors)


def test_wrong_settings_name_their_flag(tmp_path: Path) -> None:
    port = ("--port", "0")
    assert fails("--model", str(tmp_path / "missing"), *port).startswith("error: --model: ")
    errors = fails("--model", MODEL, "--tokenizer", str(tmp_path), *port)
    assert errors.startswith("error: --tokenizer: no tokenizer.json")


@pytest.mark.parametrize("wrong", ["--host=256.1.1.1", "--host=192.0.2.1", "--scheduler=fast"])
def test_wrong_values_name_their_flag(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", MODEL, "--port", "0", wrong]) == 2
    output = capsys.readouterr()
    assert (
        output.err.startswith(f"error: {wrong.partition('=')[0]}: ")
        and output.err.count("\n") == 1
        and output.out == ""
    )


@pytest.mark.parametrize(
    "wrong",
    ["--dtype=fast", "--unknown=1", "--port=none", "--max-model-len=4q", "--mod=preset:toy"],
)
def test_wrong_flags_are_named(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([wrong])
    assert caught.value.code == 2 and wrong.partition("=")[0] in capsys.readouterr().err


def test_stream_parser_notices_a_cut_stream() -> None:
    """Check a helper used by all tests above."""
    with pytest.raises(AssertionError, match="without"):
        list(parse_events(iter(['data: {"choices": []}', ""])))


def test_texts_of_a_model_are_read_before_anything_is_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The directory has no weights: an error about weights would mean that they were read first."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo_directory() / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"temperature": -5}')
    assert main(["--model", str(tmp_path), "--port", "0"]) == 2
    assert "--generation-config" in capsys.readouterr().err
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    (tmp_path / "generation_config.json").unlink()
    assert main(["--model", str(tmp_path), "--port", "0"]) == 2
    assert "--chat-template" in capsys.readouterr().err
