"""Tools for attacks on a server: raw connections, rows and pages in its metrics, and a watched stream."""

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import httpx

from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.request import SamplingParams
from tests.serve.running import MODEL, VOCAB_SIZE, Server, parse_events, wait_until
from tests.sim.oracle import toy_generate

LONG: dict[str, Any] = {"max_tokens": 8000, "ignore_eos": True}
# With greedy sampling the toy ends in an endless run of end tokens, which have no text.
SEEDED: dict[str, Any] = {"temperature": 1, "seed": 7}
MESSAGE: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
APIS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": MESSAGE,
    "/v1/messages": MESSAGE,
    "/v1/responses": {"input": "x"},
}
WATCHED = "a stream that nothing may disturb"
STALL = 4.0  # seconds without a piece, on a busy machine
ERROR_KEYS = {"message", "type", "param", "code"}


@dataclass(frozen=True)
class Usage:
    """The resources in use by the engine."""

    running: float
    waiting: float
    pages: float


@cache
def expected_text(prompt: str, num_tokens: int) -> str:
    """The text of the toy with `SEEDED`, computed without a server, an engine or pages."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **SEEDED)
    return ByteTokenizer().decode(
        toy_generate(list(prompt.encode()), params, vocab_size=VOCAB_SIZE)
    )


class Watch(threading.Thread):
    """Reads one long stream after another and compares each piece with the oracle."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.pieces = 0
        self.longest_wait = 0.0  # seconds between two pieces
        self.failure: BaseException | None = None
        self._server = server
        self._ended = threading.Event()
        self._expected = expected_text(WATCHED, LONG["max_tokens"])

    def run(self) -> None:
        try:
            with httpx.Client(
                base_url=self._server.url, headers=self._server.http.headers, timeout=20
            ) as client:
                while not self._ended.is_set():
                    self._read(client)
        except BaseException as error:
            self.failure = error

    def finish(self) -> None:
        """Hang up, and raise the thread's error if there is one."""
        self._ended.set()
        self.join(30)
        assert not self.is_alive(), "the watched stream does not end"
        if self.failure is not None:
            raise AssertionError(
                f"the watched stream was disturbed: {self.failure!r}"
            ) from self.failure

    def _read(self, client: httpx.Client) -> None:
        body = {"model": MODEL, "prompt": WATCHED, "stream": True, **SEEDED, **LONG}
        at, last = 0, None
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            for event in parse_events(response.iter_lines()):
                assert "error" not in event, event
                piece = event["choices"][0]["text"]
                assert self._expected.startswith(piece, at), (
                    f"other text from character {at} on: {piece!r}"
                )
                at += len(piece)
                self.pieces += 1
                now = time.monotonic()
                self.longest_wait = max(self.longest_wait, 0.0 if last is None else now - last)
                last = now
                if self._ended.is_set():
                    return
        assert at == len(self._expected), f"the stream ended after {at} characters"


@contextlib.contextmanager
def watched(server: Server) -> Iterator[Watch]:
    """A context with a long stream that must stay correct; afterwards no request may be left."""
    watch = Watch(server)
    watch.start()
    try:
        wait_until(lambda: watch.pieces or watch.failure, 20)
        yield watch
        before = watch.pieces
        wait_until(lambda: watch.pieces > before or watch.failure, 20)
    finally:
        watch.finish()
    assert watch.longest_wait < STALL, f"the watched stream stalled for {watch.longest_wait:.1f} s"
    wait_calm(server)


def metrics(server: Server) -> dict[str, float]:
    """The samples of `/metrics` by name without prefix, labels unchanged."""
    response = server.http.get("/metrics")
    assert response.status_code == 200
    lines = [line for line in response.text.splitlines() if line and not line.startswith("#")]
    return {
        name.removeprefix("orca_jax_"): float(value)
        for name, _, value in (line.rpartition(" ") for line in lines)
    }


def usage(server: Server) -> Usage:
    """Rows, queue and pages in use by all requests; pages are infinite before the first heartbeat."""
    samples = metrics(server)
    pages = samples["kv_pages_used"] if samples["kv_pages"] else float("inf")
    return Usage(samples["num_requests_running"], samples["num_requests_waiting"], pages)


def wait_calm(server: Server, timeout: float = 15) -> None:
    """Wait until no request, row or page is in use; heartbeats report pages a moment late."""
    wait_until(lambda: usage(server) == Usage(0, 0, 0), timeout)


def check_error(response: httpx.Response, *statuses: int) -> dict[str, Any]:
    """The error in the format of its route; its status must be in `statuses`, by default any 4xx.

    Anthropic's format has no `param` and no `code`: the message stands for them.
    """
    allowed = statuses or range(400, 500)
    assert response.status_code in allowed, (response.status_code, response.text[:300])
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    if response.request.url.path.startswith("/v1/messages"):
        assert body.keys() == {"type", "error", "request_id"} and body["error"].keys() == {
            "type",
            "message",
        }, body
        body = {"error": {**body["error"], "param": body["error"]["message"], "code": None}}
    assert body.keys() == {"error"} and body["error"].keys() == ERROR_KEYS, body
    error: dict[str, Any] = body["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    assert all(error[key] is None or isinstance(error[key], str) for key in ("param", "code"))
    assert not re.search(r"Traceback|\.py\b|site-packages|0x[0-9a-f]{6}", error["message"]), error
    return error


def post_raw(server: Server, body: bytes, path: str = "/v1/completions") -> httpx.Response:
    """Post a body unchanged, valid JSON or not."""
    return server.http.post(path, content=body, headers={"content-type": "application/json"})


def connect(
    server: Server, timeout: float = 20, receive_buffer: int | None = None
) -> socket.socket:
    """A raw connection; with at most `receive_buffer` bytes in the kernel, if given."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(timeout)
    connection.connect((server.http.base_url.host, server.http.base_url.port))
    return connection


def head(path: str = "/v1/completions", method: str = "POST", **headers: str) -> bytes:
    """The head of a request, without its final empty line."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: localhost",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "".join(f"{line}\r\n" for line in lines).encode()


def request(fields: Mapping[str, Any], path: str = "/v1/completions") -> bytes:
    """The bytes of a whole call."""
    payload = json.dumps({"model": MODEL, **fields}).encode()
    return (
        head(path, content_type="application/json", content_length=str(len(payload)))
        + b"\r\n"
        + payload
    )


def call_of(path: str, max_tokens: int = LONG["max_tokens"], **fields: Any) -> dict[str, Any]:
    """The fields of a call of any API. It runs to its limit."""
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {**APIS[path], limit: max_tokens, "ignore_eos": True, **fields}


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the answer on a raw connection."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


def hang_up(connection: socket.socket, *, rudely: bool = False) -> None:
    """Close the connection; if `rudely`, by a reset, so that bytes in transit are lost."""
    if rudely:
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
        )
    connection.close()
