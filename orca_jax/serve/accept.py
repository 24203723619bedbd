"""Accepts connections, fewer than the limit of open files allows: at the limit, idle ones make room for new ones."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Collection
from typing import Any

from orca_jax.link.open_files import file_limit, free_files
from orca_jax.serve.connection import Connection, IdleConnections
from orca_jax.values.errors import ConfigError

# for the engine's link, the processes of chat templates, files of models, and exports
RESERVED_FILES = 64
MIN_CONNECTIONS = 16
ACCEPTS_PER_TURN = 64  # of the event loop
PAUSE_SECONDS = 1.0  # after the system refuses a connection
TLS_END_SECONDS = 5.0  # for the peer to confirm the end of TLS
SILENT_SECONDS = 60.0  # between two warnings
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

logger = logging.getLogger(__name__)


def connection_limit() -> int:
    """The number of connections for which the limit of open files leaves room, beside `RESERVED_FILES`.

    Raises:
        ConfigError: there is room for fewer than `MIN_CONNECTIONS`.
    """
    free = free_files(RESERVED_FILES)
    if free < MIN_CONNECTIONS:
        limit = file_limit()
        needed = limit - free + MIN_CONNECTIONS
        raise ConfigError(
            f"the limit of open files is {limit}; allow at least {needed}, for example by ulimit -n 4096"
        )
    return free


class Acceptor:
    """Accepts connections of one listening socket in the event loop.

    At `limit` connections, the one that has been without a request for longest is closed for each new one. If all have
    requests, new ones wait in the kernel's queue. They wait for `PAUSE_SECONDS` if the system refuses a connection.

    Args:
        listener: a listening socket; the caller closes it after `close`.
        make_connection: makes the protocol of a connection.
        idle: registers the connections without a request.
        connections: the connections made and not yet lost.
        limit: largest number of connections.
        context: the context of TLS.
        handshake_timeout: seconds for the handshake of TLS.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_connection: Callable[[], Connection],
        idle: IdleConnections,
        connections: Collection[object],
        *,
        limit: int,
        context: ssl.SSLContext | None,
        handshake_timeout: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_connection = make_connection
        self._idle = idle
        self._connections = connections
        self._evicted: Connection | None = None  # until it is lost
        self._limit = limit
        self._tls: dict[str, Any] = {}
        if context is not None:
            self._tls = {
                "ssl": context,
                "ssl_handshake_timeout": handshake_timeout,
                "ssl_shutdown_timeout": TLS_END_SECONDS,
            }
        # the oldest first; the last ones may be made already
        self._starting: dict[Connection, asyncio.Task[None]] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._last_warning = float("-inf")
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no further connection, and give up unfinished handshakes."""
        self._idle.on_change = None
        self._loop.remove_reader(self._listener.fileno())
        if self._pause is not None:
            self._pause.cancel()
        for task in self._starting.values():
            task.cancel()

    def _accept(self) -> None:
        for turn in range(ACCEPTS_PER_TURN):
            if self._evicted is not None and self._evicted in self._connections:
                return  # its file is free in one of the next turns
            if self._num_open() >= self._limit:
                if turn > 0:
                    return  # perhaps no client is waiting any more
                self._warn(
                    f"{self._limit} connections are open, as many as the limit of open files allows"
                )
                if not self._make_room():
                    self._loop.remove_reader(self._listener.fileno())
                    self._idle.on_change = self._on_room
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise  # the event loop logs it
                self._warn(f"the system refuses a connection: {error.strerror}")
                self._make_room()
                self._loop.remove_reader(self._listener.fileno())
                self._pause = self._loop.call_later(PAUSE_SECONDS, self._resume)
                return
            connection = self._make_connection()
            self._starting[connection] = self._loop.create_task(self._start(connection, accepted))

    async def _start(self, connection: Connection, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, accepted, **self._tls)
        except OSError:  # the peer has gone, or does not speak TLS
            accepted.close()
        finally:
            self._starting.pop(connection, None)
            if self._idle.on_change is not None:
                self._on_room(connection)

    def _num_open(self) -> int:
        most = len(self._connections) + len(self._starting)
        if most < self._limit:
            return most
        return most - sum(one in self._connections for one in self._starting)

    def _make_room(self) -> bool:
        """Close a connection without a request, or else the oldest handshake; return False if there is neither."""
        if (connection := self._idle.longest()) is not None:
            self._evicted = connection
            connection.abort()
            return True
        if self._tls and self._starting:
            self._evicted = next(iter(self._starting))
            self._starting.pop(self._evicted).cancel()
            return True
        return False

    def _on_room(self, _: Connection) -> None:
        """Accept again: one of as many connections as allowed is lost, or idle."""
        self._idle.on_change = None
        if self._pause is None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _warn(self, reason: str) -> None:
        """Log a warning, unless one was logged within `SILENT_SECONDS`."""
        now = self._loop.time()
        if now - self._last_warning >= SILENT_SECONDS:
            self._last_warning = now
            logger.warning("%s (ulimit -n): idle connections are closed, and new ones wait", reason)
