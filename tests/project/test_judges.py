"""The runner of the third-party clients: the recording proxy and the table."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from lab.judges.page import BEGIN, END, update
from lab.judges.recorder import Exchange, Recorder
from tests.project.source import ROOT

Serve = Callable[[socket.socket], None]

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-request-id: r\r\n\r\nok"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@contextlib.contextmanager
def listening(serve: Serve) -> Iterator[int]:
    """A server that calls a function with each connection, one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as connection:
                        connection.settimeout(10)
                        serve(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


@contextlib.contextmanager
def recording(serve: Serve) -> Iterator[tuple[Recorder, list[Exchange]]]:
    seen: list[Exchange] = []
    with listening(serve) as port, Recorder(port, seen.append).running() as recorder:
        yield recorder, seen


def answer_all(connection: socket.socket) -> None:
    """Send a response after each head: it may come before its request has ended."""
    while data := connection.recv(65536):
        for _ in range(data.count(b" HTTP/1.1\r\n")):
            connection.sendall(ANSWER)


def test_every_answer_of_a_connection_is_seen() -> None:
    with (
        recording(answer_all) as (recorder, seen),
        httpx.Client(base_url=f"http://127.0.0.1:{recorder.port}") as http,
    ):
        assert http.get("/a?x=1").text == "ok"
        assert http.post("/b", content=b"body").text == "ok"
    assert [
        (e.method, e.target, bytes(e.request_body), e.status, bytes(e.body), e.complete)
        for e in seen
    ] == [
        ("GET", "/a?x=1", b"", 200, b"ok", True),
        ("POST", "/b", b"body", 200, b"ok", True),
    ]
    assert (
        seen[0].headers["x-request-id"] == "r"
        and recorder.statuses == {200: 2}
        and recorder.num_unread == 0
    )


def test_an_answer_may_come_before_its_request_has_ended() -> None:
    head = b"POST /early HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
    with (
        recording(answer_all) as (recorder, seen),
        socket.create_connection(("127.0.0.1", recorder.port), 10) as client,
    ):
        for _ in range(2):
            client.sendall(head)
            assert client.recv(1000) == ANSWER
            client.sendall(b"body")
    assert [(e.target, bytes(e.request_body), e.complete) for e in seen] == [
        ("/early", b"body", True)
    ] * 2


def test_streams_pass_as_they_come_and_hang_ups_too() -> None:
    hung_up = threading.Event()

    def stream(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(STREAM_HEAD + b"3\r\none\r\n")
        if connection.recv(1) == b"":
            hung_up.set()

    with recording(stream) as (recorder, seen):
        with httpx.stream("GET", f"http://127.0.0.1:{recorder.port}/", timeout=60) as answer:
            assert next(answer.iter_raw()) == b"one", "the first piece, while the server waits"
        assert hung_up.wait(60)
    assert [(bytes(e.body), e.complete) for e in seen] == [(b"one", False)]


def test_a_server_that_breaks_off_has_not_completed_its_answer() -> None:
    def break_off(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(STREAM_HEAD + b"3\r\none\r\n")

    with recording(break_off) as (recorder, seen), pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{recorder.port}/", timeout=60)
    assert [(bytes(e.body), e.complete) for e in seen] == [(b"one", False)]


def test_nonsense_passes_and_is_counted() -> None:
    got: list[bytes] = []

    def take(connection: socket.socket) -> None:
        got.append(connection.recv(65536))
        connection.sendall(b"what?")

    with (
        recording(take) as (recorder, seen),
        socket.create_connection(("127.0.0.1", recorder.port), 10) as client,
    ):
        client.sendall(b"\0\1nonsense\r\n\r\n")
        assert client.recv(100) == b"what?"
        assert client.recv(100) == b""
    assert got == [b"\0\1nonsense\r\n\r\n"] and seen == [] and recorder.num_unread == 1


def test_a_check_that_fails_is_a_violation() -> None:
    def refuse(exchange: Exchange) -> None:
        raise AssertionError(f"{exchange.status} is wrong")

    with listening(answer_all) as port, Recorder(port, refuse).running() as recorder:
        assert httpx.get(f"http://127.0.0.1:{recorder.port}/a").text == "ok", (
            "the client is not disturbed"
        )
    assert recorder.violations == ["GET /a b'': 200 is wrong"]


def test_page_keeps_the_rows_of_clients_that_did_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n", encoding="utf-8")
    row = ("v 1", "2 of 2 checks", "5 answers, 0 violations", "yes", "today, abc")
    update(page, {"one": row, "gone": row}, ["one", "gone"])
    update(page, {"two": ("v 2", *row[1:])}, ["two", "one"])
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("after\n")
    assert [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| ")][1:] == [
        ["| two", "v 2"],
        ["| one", "v 1"],
    ]
    with pytest.raises(SystemExit, match="has no"):
        update(ROOT / "README.md", {}, [])


def test_requirements_are_pinned() -> None:
    files = sorted((ROOT / "lab" / "judges" / "requirements").glob("*.txt"))
    assert len(files) > 5
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        assert lines and all(line.count("==") == 1 and "@" not in line for line in lines), file.name
    for file in (ROOT / "lab" / "judges").rglob("package.json"):
        packages = json.loads(file.read_text(encoding="utf-8"))["dependencies"]
        assert packages and all(version[0].isdecimal() for version in packages.values())
