"""The link to one engine process: starts it, exchanges messages over a socket, and ends it."""

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import cast

from orca_jax.link.watch import MemoryWatch, StarvedThreads
from orca_jax.link.wire import (
    Failed,
    FrameReader,
    FromEngine,
    Heartbeat,
    Leave,
    Message,
    Ready,
    Start,
    decode_from_engine,
    encode,
)
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import UNREADABLE, ClusterLostError, ConfigError, EngineDeadError

CLOSE_SECONDS = 3.0  # between closing the socket and killing the process


class EngineLink(asyncio.Protocol):
    """One engine process and the socket to it. All methods belong to one event loop.

    Args:
        take: called with every message except `Ready` and `Failed`, in the engine's order.
        begun: begin of the start that the engine reports, in seconds of `time.monotonic`; None for the call of `start`.

    Attributes:
        ready: resolves when the engine serves; fails with EngineDeadError if it ends before.
        ended: set when the socket is closed: no message will come any more.
        num_heard: count of reads with bytes from the engine; it stands still while the engine is silent.
    """

    def __init__(self, take: Callable[[FromEngine], None], begun: float | None = None) -> None:
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.num_heard = 0
        self._take = take
        self._begun = begun
        self._frames = FrameReader()
        self._failure: Failed | None = None
        self._socket: socket.socket | None = None
        self._is_alone = False  # no other processes need its farewell
        self._transport: asyncio.WriteTransport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reaper: asyncio.Task[None] | None = None
        self._threads: StarvedThreads | None = None
        self._memory: MemoryWatch | None = None

    async def start(self, config: ServerConfig) -> None:
        """Start the process and send it the configuration of the engine."""
        begun = self._begun or time.monotonic()
        self._is_alone = config.cluster is None
        ours, theirs = socket.socketpair()
        self._socket = ours
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(
                    sys.executable,
                    "-m",
                    "orca_jax.link.process",
                    str(theirs.fileno()),
                    config.log_format,
                ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,  # the server's own stdout is for the address and the curl line
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # only the front end handles Ctrl-C in a terminal
            )
        self._threads = StarvedThreads(self._process.pid)
        self._memory = MemoryWatch(self._process.pid)
        self._reaper = asyncio.create_task(self._notice_exit(self._process))
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        self.send(
            Start(config.engine, begun, config.kv_events, config.cluster, config.explain_cache)
        )

    def send(self, message: Message) -> None:
        """Send a message; discard it if the engine has ended."""
        if self._transport is not None and not self.ended.is_set():
            self._transport.write(encode(message))

    def starved_seconds(self) -> dict[str, float]:
        """Total seconds during which each thread of the engine was ready and had no processor; empty if not known."""
        if self._threads is None:
            return {}
        return self._threads.seconds()

    def kill(self, reason: str) -> None:
        """End the process now, even if it is stopped. `exit_reason` will return `reason`."""
        self._failure = Failed(reason)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Close the socket, which ends the process; kill the process if it does not end in time."""
        if self._transport is not None:
            self.send(Leave())
            self._transport.close()
        elif self._socket is not None:
            self._socket.close()  # the start was cancelled
        if self._process is None:
            return
        if self._is_alone and not self.ready.done() and self._process.returncode is None:
            self._process.kill()  # it loads, and would go on for a second
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._reaper is not None:
            self._reaper.cancel()
            await self._reaper

    async def exit_reason(self) -> EngineDeadError | ConfigError:
        """The reason of the end, as an error for the operator. Call it after `ended`."""
        if self._failure is not None:
            if self._failure.is_config:
                return ConfigError(self._failure.message, self._failure.param)
            if self._failure.is_cluster:
                return ClusterLostError(self._failure.message)
            return EngineDeadError(self._failure.message)
        assert self._process is not None
        try:
            code = await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            return EngineDeadError("the engine process closed its socket")
        if code >= 0:
            return EngineDeadError(f"the engine process ended with exit code {code}")
        reason = None
        if code == -signal.SIGKILL and self._memory is not None:
            reason = self._memory.reason()
        by_signal = reason or f"was killed by {_signal_name(-code)}"
        return EngineDeadError(f"the engine process {by_signal}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's classes have other bases
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self.num_heard += 1
        try:
            for payload in self._frames.feed(data):
                message = decode_from_engine(payload)
                if isinstance(message, Heartbeat) and self._memory is not None:
                    self._memory.look()
                if isinstance(message, Failed):
                    self._failure = self._failure or message  # the first reason is the cause
                elif not isinstance(message, Ready):
                    self._take(message)
                elif not self.ready.done():
                    self.ready.set_result(message)
        except UNREADABLE as error:
            self.kill(f"the engine sent an invalid message: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        if not self.ready.done():
            self.ready.set_exception(
                EngineDeadError("the engine process ended while it was loading")
            )
            self.ready.exception()  # without a reader asyncio would log it as never retrieved

    async def _notice_exit(self, process: asyncio.subprocess.Process) -> None:
        """Close the socket after the process: a child of the engine may keep it open."""
        with contextlib.suppress(asyncio.CancelledError):
            await process.wait()
            await asyncio.sleep(0.2)  # to read the last messages in the socket
            if self._transport is not None:
                self._transport.abort()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"
