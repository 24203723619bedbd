"""Clients hang up in every phase of a call: rows and pages are freed, and other calls are not disturbed."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.chaos.world import (
    APIS,
    LONG,
    Watch,
    call_of,
    connect,
    hang_up,
    head,
    request,
    usage,
    wait_calm,
    watched,
)
from tests.serve.running import MODEL, Server, wait_until

SHAPES: dict[str, dict[str, Any]] = {
    "one": {"prompt": "one"},
    "n": {"prompt": "one", "n": 3},
    "batch": {"prompt": ["one", "two", "three"]},
}
OTHERS = tuple(path for path in APIS if path != "/v1/completions")
SLOW_GRAMMAR = {
    "json": {"anyOf": [{"type": "string", "pattern": f"^a{{{i}}}b+$"} for i in range(500)]}
}


@pytest.mark.parametrize("rudely", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9])
def test_before_the_request_is_whole(
    server: Server, watch: Watch, share: float, rudely: bool
) -> None:
    """The client hangs up in the head and in the body."""
    whole = request({"prompt": "x" * 5000, **LONG})
    for _ in range(20):
        connection = connect(server)
        connection.sendall(whole[: int(len(whole) * share)])
        hang_up(connection, rudely=rudely)


@pytest.mark.parametrize("rudely", [False, True])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_soon_as_it_was_sent(
    server: Server, watch: Watch, shape: str, stream: bool, rudely: bool
) -> None:
    """The hang-up races with parsing, queueing and the initiation phase."""
    for size in (1, 100, 5000):
        for _ in range(5):
            connection = connect(server)
            connection.sendall(
                request({**SHAPES[shape], "user": "x" * min(size, 100), "stream": stream, **LONG})
            )
            hang_up(connection, rudely=rudely)
    wait_until(lambda: usage(server).running <= 1, 20)


@pytest.mark.parametrize("stream", [True, False])
def test_in_the_initiation_phase(server: Server, watch: Watch, stream: bool) -> None:
    for _ in range(10):
        connection = connect(server)
        connection.sendall(
            request(
                {"prompt": [65] * 7000, "max_tokens": 1000, "ignore_eos": True, "stream": stream}
            )
        )
        hang_up(connection)


@contextmanager
def full_rows(server: Server) -> Iterator[None]:
    """All rows but that of the watched stream are in use."""
    connection = connect(server)
    connection.sendall(request({"prompt": ["x"] * 7, "stream": True, **LONG}))
    wait_until(lambda: usage(server).running == 8, 10)
    try:
        yield
    finally:
        hang_up(connection)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_the_queue(server: Server, watch: Watch, shape: str, stream: bool) -> None:
    with full_rows(server):
        connection = connect(server)
        connection.sendall(request({**SHAPES[shape], "stream": stream, **LONG}))
        wait_until(lambda: usage(server).waiting == (1 if shape == "one" else 3))
        hang_up(connection)
        wait_until(lambda: usage(server).waiting == 0, 5)


@pytest.mark.parametrize("rudely", [False, True])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_the_increment_phase(
    server: Server, watch: Watch, shape: str, stream: bool, rudely: bool
) -> None:
    connection = connect(server)
    connection.sendall(request({**SHAPES[shape], "stream": stream, **LONG}))
    count = 1 if shape == "one" else 3
    wait_until(lambda: usage(server).running == 1 + count, 10)
    if stream:
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    hang_up(connection, rudely=rudely)
    wait_until(lambda: usage(server).running <= 1, 5)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", OTHERS)
def test_other_apis_in_the_increment_phase(
    server: Server, watch: Watch, path: str, stream: bool
) -> None:
    connection = connect(server)
    connection.sendall(request(call_of(path, stream=stream), path))
    wait_until(lambda: usage(server).running == 2, 10)
    hang_up(connection)
    wait_until(lambda: usage(server).running <= 1, 5)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", OTHERS)
def test_other_apis_in_the_queue(server: Server, watch: Watch, path: str, stream: bool) -> None:
    with full_rows(server):
        connection = connect(server)
        connection.sendall(request(call_of(path, stream=stream), path))
        wait_until(lambda: usage(server).waiting == 1)
        hang_up(connection)
        wait_until(lambda: usage(server).waiting == 0, 5)


@pytest.mark.parametrize("rudely", [False, True])
@pytest.mark.parametrize("path", OTHERS)
def test_other_apis_as_soon_as_sent(server: Server, watch: Watch, path: str, rudely: bool) -> None:
    """Also while a grammar is compiled, and while a conversation is shortened."""
    more: list[dict[str, Any]] = [{}, {"structured_outputs": SLOW_GRAMMAR, "max_tokens": 1000}]
    if path == "/v1/responses":
        talk = [
            {"role": role, "content": "x" * 50}
            for _ in range(500)
            for role in ("user", "assistant")
        ]
        more = [{}, {"structured_outputs": SLOW_GRAMMAR}, {"input": talk, "truncation": "auto"}]
    for fields in more:
        for stream in (True, False):
            connection = connect(server)
            connection.sendall(request({**call_of(path, stream=stream), **fields}, path))
            hang_up(connection, rudely=rudely)
    wait_until(lambda: usage(server).running <= 1, 20)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_while_a_grammar_is_compiled(
    server: Server, watch: Watch, shape: str, stream: bool
) -> None:
    for _ in range(5):
        connection = connect(server)
        fields = {
            **SHAPES[shape],
            "structured_outputs": SLOW_GRAMMAR,
            "stream": stream,
            "max_tokens": 1000,
        }
        connection.sendall(request(fields))
        hang_up(connection)
    wait_until(lambda: usage(server).running <= 1, 20)


def test_half_closed_is_hung_up(server: Server) -> None:
    """Closing the sending half counts as hanging up; in any case nothing is held after the client is gone."""
    with watched(server), connect(server) as connection:
        connection.sendall(request({"prompt": "x", "stream": True, **LONG}))
        assert connection.recv(1024)
        connection.shutdown(1)
    wait_calm(server)


def test_pipelined_calls_do_not_mix(server: Server, watch: Watch) -> None:
    """The second call waits in the connection of the first one, and ends with it."""
    connection = connect(server)
    connection.sendall(
        request({"prompt": "x", "stream": True, **LONG}) + request({"prompt": "y", **LONG})
    )
    wait_until(lambda: usage(server).running == 2, 10)
    hang_up(connection)
    wait_until(lambda: usage(server).running <= 1, 5)


def test_hundreds_at_once(server: Server, watch: Watch) -> None:
    connections = [connect(server) for _ in range(300)]
    for number, connection in enumerate(connections):
        connection.sendall(request({"prompt": f"{number}", "stream": bool(number % 2), **LONG}))
    for number, connection in enumerate(connections):
        hang_up(connection, rudely=bool(number % 3))
    wait_until(lambda: (usage(server).running, usage(server).waiting) <= (1, 0), 20)


def test_expecting_permission_and_leaving(server: Server, watch: Watch) -> None:
    """`Expect: 100-continue` without the body."""
    payload = json.dumps({"model": MODEL, "prompt": "x"}).encode()
    announcement = head(
        content_type="application/json", content_length=str(len(payload)), expect="100-continue"
    )
    for _ in range(5):
        connection = connect(server)
        connection.sendall(announcement + b"\r\n")
        assert connection.recv(1024).startswith(b"HTTP/1.1 100")
        hang_up(connection)
