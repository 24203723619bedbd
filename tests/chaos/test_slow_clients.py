"""Clients that read or write slowly block neither the engine nor the server, and leave nothing behind."""

import time
from typing import Any

import psutil
import pytest

from tests.chaos.world import APIS, LONG, Watch, call_of, connect, head, read_answer, request, usage
from tests.serve.running import Server, wait_until

TIMEOUT = 3.0  # --read-timeout and --write-timeout of the shared server
MIB = 2**20


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, {}) for path in APIS),
        ("/v1/completions", {"n": 4}),
        ("/v1/completions", {"prompt": ["x"] * 4}),
    ],
)
def test_a_client_that_never_reads(
    server: Server, watch: Watch, path: str, fields: dict[str, Any]
) -> None:
    """The requests of a client without progress are ended, and its unread data is bounded."""
    before = psutil.Process(server.process.pid).memory_info().rss
    with connect(server, receive_buffer=4096) as connection:
        connection.sendall(request(call_of(path, stream=True, **fields), path))
        wait_until(lambda: usage(server).running > 1, 10)
        wait_until(lambda: usage(server).running == 1, 60)
        assert psutil.Process(server.process.pid).memory_info().rss - before < 64 * MIB


def test_many_clients_that_never_read(server: Server, watch: Watch) -> None:
    connections = [connect(server, receive_buffer=4096) for _ in range(30)]
    try:
        for connection in connections:
            connection.sendall(request({"prompt": "x" * 100, "stream": True, **LONG}))
        pieces = watch.pieces
        wait_until(lambda: watch.pieces > pieces + 500, 20)
        assert server.complete("in between", max_tokens=1).status_code == 200
    finally:
        for connection in connections:
            connection.close()


@pytest.mark.parametrize("part", ["head", "body", "nothing"])
def test_a_client_that_writes_a_byte_now_and_then(server: Server, watch: Watch, part: str) -> None:
    """Every byte arrives in time, the whole request does not: the server closes or answers with an error."""
    with connect(server) as connection:
        whole = request({"prompt": "x" * 1000, "max_tokens": 1})
        at = {"head": 20, "body": len(whole) - 900, "nothing": 0}[part]
        connection.sendall(whole[:at])
        start = time.monotonic()
        try:
            while part == "nothing" or not _has_news(connection):
                if part == "nothing":
                    connection.settimeout(TIMEOUT + 10)
                    assert connection.recv(1024) == b""
                    break
                connection.sendall(whole[at : at + 1])
                at += 1
                assert time.monotonic() - start < TIMEOUT + 10, "it may take as long as it likes"
                time.sleep(0.2)
            else:
                status, _ = read_answer(connection)
                assert status == 408
        except (ConnectionError, EOFError):
            pass


def test_hundreds_of_slow_writers_block_no_other_client(server: Server, watch: Watch) -> None:
    connections = [connect(server) for _ in range(300)]
    try:
        for connection in connections:
            connection.sendall(
                head(content_type="application/json", content_length="1000") + b"\r\n{"
            )
        assert server.complete("quick", max_tokens=2).status_code == 200
    finally:
        for connection in connections:
            connection.close()


def _has_news(connection: Any) -> bool:
    connection.settimeout(0.01)
    try:
        return bool(connection.recv(1, 2)) or True  # MSG_PEEK; the end of the stream counts as well
    except TimeoutError:
        return False
    finally:
        connection.settimeout(20)
