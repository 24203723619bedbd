"""The limit of connections: at the limit idle ones are closed, and new ones wait; the loop never spins."""

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest

from orca_jax.serve import accept
from orca_jax.serve.accept import Acceptor, connection_limit
from orca_jax.serve.connection import IdleConnections
from orca_jax.values.errors import ConfigError
from tests.serve.running import running, wait_until

pytestmark = pytest.mark.anyio


class OneByte(asyncio.Protocol):
    """Idle until its first byte, then busy for ever. `transport.abort` stands for `Connection.abort`."""

    def __init__(self, world: "World") -> None:
        self.world = world

    def connection_made(self, transport: Any) -> None:
        self.abort = transport.abort
        self.world.connections.append(self)
        self.world.idle.update(self, is_idle=True)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self.world.idle.update(self, is_idle=False)  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self.world.connections.remove(self)
        self.world.idle.lost(self)  # type: ignore[arg-type]


class World:
    """A listening socket, whose accepts are counted, and its clients."""

    def __init__(self, limit: int, listener: socket.socket, context: ssl.SSLContext | None) -> None:
        self.idle, self.connections = IdleConnections(), list[OneByte]()
        self.num_accepts, self.refuses = 0, False
        self.listener = listener
        self.clients: list[socket.socket] = []
        self.acceptor = Acceptor(
            self,  # type: ignore[arg-type]
            lambda: OneByte(self),  # type: ignore[arg-type, return-value]
            self.idle,
            self.connections,
            limit=limit,
            context=context,
            handshake_timeout=30,
        )

    def fileno(self) -> int:
        return self.listener.fileno()

    def setblocking(self, flag: bool) -> None:
        self.listener.setblocking(flag)

    def accept(self) -> Any:
        self.num_accepts += 1
        if self.refuses:
            raise OSError(errno.EMFILE, "Too many open files")
        return self.listener.accept()

    async def connect(self) -> socket.socket:
        client = socket.create_connection(self.listener.getsockname())
        client.setblocking(False)
        self.clients.append(client)
        await self.turns()
        return client

    async def turns(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0.001)


def is_open(client: socket.socket) -> bool:
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


@contextlib.asynccontextmanager
async def world(limit: int, context: ssl.SSLContext | None = None) -> AsyncIterator[World]:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        made = World(limit, listener, context)
        try:
            yield made
        finally:
            made.acceptor.close()
            for client in made.clients:
                client.close()
            await made.turns()


async def test_the_longest_idle_connection_makes_room() -> None:
    async with world(3) as here:
        first, second, third = [await here.connect() for _ in range(3)]
        first.send(b"x")
        await here.turns()
        fourth = await here.connect()
        assert [is_open(each) for each in (first, second, third, fourth)] == [
            True,
            False,
            True,
            True,
        ]
        assert len(here.connections) == 3


async def test_new_ones_wait_while_all_are_busy(caplog: pytest.LogCaptureFixture) -> None:
    async with world(2) as here:
        first, second = [await here.connect() for _ in range(2)]
        first.send(b"x")
        second.send(b"x")
        third = await here.connect()
        before = here.num_accepts
        await here.turns()
        assert len(here.connections) == 2 and here.num_accepts == before, (
            "the loop does not try again and again"
        )
        first.close()
        await here.turns()
        assert len(here.connections) == 2 and here.num_accepts > before
        third.send(b"x")
        await here.turns()
        assert is_open(second) and is_open(third)
    (line,) = caplog.messages
    assert line.startswith(
        "2 connections are open, as many as the limit of open files allows (ulimit -n): idle"
    )


async def test_many_at_once_are_served_one_after_another() -> None:
    """Each new one closes one idle one, not more."""
    async with world(4) as here:
        for _ in range(30):
            here.clients.append(socket.create_connection(here.listener.getsockname()))
        for _ in range(10):
            await here.turns()
        for client in here.clients:
            client.setblocking(False)
        assert [is_open(client) for client in here.clients] == [False] * 26 + [True] * 4


async def test_the_oldest_handshake_makes_room() -> None:
    """Clients that never begin TLS hold no place for long."""
    async with world(2, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)) as here:
        clients = [await here.connect() for _ in range(4)]
        assert [is_open(client) for client in clients] == [False, False, True, True]


async def test_accepting_pauses_when_the_system_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept, "PAUSE_SECONDS", 0.05)
    async with world(10) as here:
        idle = await here.connect()
        here.refuses, before = True, here.num_accepts
        begin = asyncio.get_running_loop().time()
        waiting = await here.connect()
        await here.turns()
        most = 2 + (asyncio.get_running_loop().time() - begin) / accept.PAUSE_SECONDS
        assert 1 <= here.num_accepts - before <= most and not is_open(idle)
        here.refuses = False
        await asyncio.sleep(0.1)
        await here.turns()
        assert is_open(waiting) and len(here.connections) == 1
    assert caplog.messages == [
        "the system refuses a connection: Too many open files (ulimit -n): idle connections are closed, "
        "and new ones wait"
    ]


def test_a_limit_of_files_that_is_too_low_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (60, 60))
    with pytest.raises(
        ConfigError,
        match=r"the limit of open files is 60; allow at least \d+, for example by ulimit",
    ):
        connection_limit()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1060, 1060))
    assert 500 < connection_limit() < 1000


def test_idle_clients_do_not_stop_a_server_with_few_files(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """200 idle clients at a limit of 128 files: calls are answered, a stream goes on, and one line is logged."""
    with running(open_files=128) as server, contextlib.ExitStack() as stack:
        place = (server.http.base_url.host, server.http.base_url.port or 80)
        with server.stream("hi", max_tokens=300, ignore_eos=True) as events:
            next(events)
            for _ in range(200):
                stack.enter_context(socket.create_connection(place))
            assert server.http.get("/live").status_code == 200
            *_, last = events
        assert last["choices"][0]["finish_reason"] == "length"
        wait_until(lambda: server.errors)
        assert (
            len(server.errors) == 1
            and "as many as the limit of open files allows" in server.errors[0]
        )
