"""Slow peers and invalid HTTP, on raw connections."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.serve.running import MODEL, Server, running, wait_until
from tests.serve.test_life import iterations

BODY = json.dumps(
    {"model": MODEL, "prompt": "hi", "stream": True, "max_tokens": 8000, "ignore_eos": True}
).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
WHOLE = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """A server with short timeouts."""
    with running("--max-num-seqs", "4", "--read-timeout", "2", "--write-timeout", "1") as server:
        yield server


@contextlib.contextmanager
def connected(server: Server, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    url = server.http.base_url
    with socket.socket() as raw:
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(60)
        raw.connect((url.host, url.port or 80))
        yield raw


def read_all(raw: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := raw.recv(1 << 16):
            data += piece
    return data


def read_answers(raw: socket.socket, count: int) -> bytes:
    """`count` answers of `/live`."""
    data = b""
    while data.count(b'{"status":"live"}') < count:
        piece = raw.recv(1 << 16)
        assert piece, data
        data += piece
    return data


def refusal(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer; then the connection must close."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert (
        b"connection: close" in head.lower() and b"content-type: application/json" in head.lower()
    )
    assert head.lower().count(b"x-content-type-options: nosniff") == 1
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error


BODY_BEGUN = b"content-length: 100\r\n\r\n{"
HALVES = {
    "head": HEAD,
    "body": HEAD + BODY_BEGUN,
    "letter": b"G",
    "message": HEAD.replace(b"/v1/completions", b"/v1/messages") + BODY_BEGUN,
    "silence": b"",
}


@pytest.fixture(scope="module")
def halves(strict: Server) -> dict[str, bytes]:
    """The answers to halves of requests, which wait for the limit together."""
    with contextlib.ExitStack() as stack:
        sockets = {name: stack.enter_context(connected(strict)) for name in HALVES}
        for name, sent in HALVES.items():
            sockets[name].sendall(sent)
        return {name: read_all(raw) for name, raw in sockets.items()}


@pytest.mark.parametrize("name", ["head", "body", "letter"])
def test_half_a_request_is_not_waited_for(halves: dict[str, bytes], name: str) -> None:
    status, error = refusal(halves[name])
    assert (status, error["code"], error["type"]) == (
        408,
        "request_timeout",
        "invalid_request_error",
    )


def test_half_a_message_is_refused_in_the_format_of_its_api(halves: dict[str, bytes]) -> None:
    status, _, body = halves["message"].partition(b"\r\n\r\n")
    answer = json.loads(body)
    assert b" 408 " in status and answer["error"]["type"] == "timeout_error"
    assert answer["type"] == "error" and answer["request_id"].startswith("req_")


def test_silence_is_closed_without_a_word(halves: dict[str, bytes]) -> None:
    assert halves["silence"] == b""


def test_trickling_does_not_help(strict: Server) -> None:
    """The limit is for the whole request, not for the time between two bytes."""
    with connected(strict) as headers, connected(strict) as body:
        headers.sendall(b"GET /live HTTP/1.1\r\nx-slow: ")
        body.sendall(HEAD + b"content-length: 1000\r\n\r\n")
        for raw in (headers, body):
            with pytest.raises((BrokenPipeError, ConnectionResetError)):
                for _ in range(600):
                    raw.sendall(b"a")
                    time.sleep(0.1)


def test_time_between_requests_is_another_matter(strict: Server) -> None:
    """A kept connection may be idle, and its next request has the full time."""
    ask = b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with connected(strict) as raw:
        for _ in range(2):  # each pause is within the limit, their sum is not
            raw.sendall(ask[:9])
            time.sleep(0.8)
            raw.sendall(ask[9:])
            assert read_answers(raw, 1).startswith(b"HTTP/1.1 200")
            time.sleep(1.4)
        raw.sendall(ask + ask)
        assert read_answers(raw, 2).count(b"HTTP/1.1 200") == 2


def test_a_long_answer_is_not_cut(strict: Server) -> None:
    """The limits apply to slow peers, not to long calls."""
    with strict.stream("hi", max_tokens=1300, ignore_eos=True) as events:
        *_, last = events
    assert last["choices"][0]["finish_reason"] == "length"


def test_who_takes_nothing_is_cut_off(strict: Server) -> None:
    """The stream of 8000 tokens ends early: after the kernel's buffers are full and the limit has passed."""
    before = iterations(strict)
    with connected(strict, receive_buffer=4096) as raw:
        raw.sendall(WHOLE)
        wait_until(lambda: strict.health().json()["running"] == 1)
        strict.wait_idle()
        assert iterations(strict) - before < 7000
        wait_until(lambda: not peers(strict, raw.getsockname()[1]))
        with contextlib.suppress(ConnectionResetError):
            assert b"[DONE]" not in read_all(raw)


def peers(server: Server, port: int) -> list[Any]:
    """The server's side of the connection from `port`."""
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    return [c for c in connections if c.raddr and c.raddr.port == port]


@pytest.mark.parametrize("size", [70_000, 200_000, 5_000_000])
def test_headers_have_a_limit(server: Server, size: int) -> None:
    with connected(server) as raw:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(
                b"GET /live HTTP/1.1\r\nhost: localhost\r\nx-long: " + b"a" * size + b"\r\n\r\n"
            )
        answer = read_all(raw)
    if answer or size < 100_000:  # with more bytes in transit, the answer may be lost in the reset
        status, error = refusal(answer)
        assert (status, error["code"]) == (431, "headers_too_large")
    assert server.http.get("/live").status_code == 200


@pytest.mark.parametrize("size", [1_000, 60_000])
def test_long_headers_within_the_limit(server: Server, size: int) -> None:
    assert server.http.get("/live", headers={"x-long": "a" * size}).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"HELO\r\n\r\n",
        b"GET /live HTTP/1.1\r\nhost: localhost\r\nbad header\r\n\r\n",
    ],
)
def test_what_is_no_http(server: Server, sent: bytes) -> None:
    with connected(server) as raw:
        raw.sendall(sent + b"\r\n\r\n")
        status, error = refusal(read_all(raw))
    assert (status, error["code"]) == (400, "invalid_http")


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("length", [b"content-length: 5\r\n", b""])
def test_a_request_of_ambiguous_length_is_refused_and_closed(
    server: Server, version: bytes, length: bytes
) -> None:
    """RFC 9112, 6.1: a proxy that looks at the other header would see another request in the rest."""
    start = b"GET /live HTTP/%s\r\nhost: localhost\r\n%stransfer-encoding: chunked\r\n\r\n" % (
        version,
        length,
    )
    with connected(server) as raw:
        raw.sendall(
            start
            + b"0\r\n\r\n"
            + b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        )
        answer = read_all(raw)
    if version == b"1.1" and not length:
        assert answer.count(b"HTTP/1.1 200") == 2
    else:
        status, error = refusal(answer)
        assert (status, error["code"]) == (400, "invalid_http") and b"HTTP/1.1 200" not in answer


@pytest.mark.parametrize("version", [b"2.0", b"0.9", b"3.0"])
def test_another_major_version_is_refused(server: Server, version: bytes) -> None:
    with connected(server) as raw:
        raw.sendall(b"GET /live HTTP/%s\r\nhost: localhost\r\n\r\n" % version)
        status, error = refusal(read_all(raw))
    assert (status, error["code"]) == (505, "http_version_not_supported")


CLOSING = b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
SHORT = json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 2}).encode()
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
LENGTH = b"content-length: %d\r\n" % len(SHORT)


# Name: (sent, statuses of the answers).
UNUSUAL: dict[str, tuple[bytes, list[int]]] = {
    "chunk extensions and trailers": (
        CHUNKED
        + b'%x;a=b;c="d"\r\n%s\r\n0\r\nx-trailer: 1\r\n\r\n' % (len(SHORT), SHORT)
        + CLOSING,
        [200, 200],
    ),
    "expect": (
        HEAD + b"expect: 100-continue\r\n" + LENGTH + b"\r\n" + SHORT + CLOSING,
        [100, 200, 200],
    ),
    "HEAD": (b"HEAD /live HTTP/1.1\r\nhost: localhost\r\n\r\n" + CLOSING, [200, 200]),
    "OPTIONS": (b"OPTIONS /live HTTP/1.1\r\nhost: localhost\r\n\r\n" + CLOSING, [405, 200]),
    "unread body": (
        b"POST /no HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\nhello" + CLOSING,
        [404, 200],
    ),
    "pipelined": ((HEAD + LENGTH + b"\r\n" + SHORT) * 20 + CLOSING, [200] * 21),
    "upgrade": (CLOSING.replace(b"close", b"upgrade, close\r\nupgrade: h2c") + CLOSING, [200]),
    "chunk too large": (CHUNKED + b"F" * 30 + b"\r\n", [400]),
    "chunk below 0": (CHUNKED + b"-1\r\n", [400]),
    "chunk too long": (CHUNKED + b"5\r\nhelloXX0\r\n\r\n", [400]),
    "trailers too long": (CHUNKED + b"0\r\n" + b"x-trailer: 1\r\n" * 10_000, [431]),
    "two lengths": (HEAD + b"content-length: 5, 6\r\n\r\nhello", [400]),
    "5000 digits": (HEAD + b"content-length: " + b"1" * 5000 + b"\r\n\r\n", [400]),
    "compressed": (
        HEAD + b"content-encoding: gzip\r\n" + LENGTH + b"\r\n" + SHORT + CLOSING,
        [415, 200],
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_requests_leave_the_connection_in_order(server: Server, name: str) -> None:
    """Each request has its answer, and the next one on the connection is not confused with its rest."""
    sent, statuses = UNUSUAL[name]
    with connected(server) as raw:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            raw.sendall(sent)
        answer = read_all(raw)
    assert [
        int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:] if part[:3].isdigit()
    ] == statuses
