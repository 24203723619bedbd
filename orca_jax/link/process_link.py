"""One engine process and the socket to it, from its start to its end."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable

import msgspec

from orca_jax.errors import ConfigError, EngineDeadError
from orca_jax.link.wire import Failed, FrameReader, FromEngine, Message, Ready, Start, decode_from_engine, encode
from orca_jax.server_config import ServerConfig

CLOSE_SECONDS = 3.0  # from goodbye to kill


class EngineLink(asyncio.Protocol):
    """All methods belong to one event loop.

    Args:
        take: called with every message, in the engine's order.

    Attributes:
        ready: what the engine says when it serves; EngineDeadError where it ended before that.
        ended: the process has gone, or is as good as gone: nothing will come any more.
        unheard: seconds of silence are counted here by whoever watches; any byte makes it 0.
    """

    def __init__(self, take: Callable[[FromEngine], None]) -> None:
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()
        self.unheard = 0.0
        self._take = take
        self._frames = FrameReader()
        self._failure: Failed | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._reaper: asyncio.Task[None] | None = None

    async def start(self, config: ServerConfig) -> None:
        """Start the process and tell it what to build."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "orca_jax.link.process", str(theirs.fileno()), config.log_format),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,  # ours is for the address and the curl line
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is the front end's to handle
            )
        self._reaper = asyncio.create_task(self._notice_exit(self._process))
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        self.send(Start(config.engine))

    def send(self, message: Message) -> None:
        """Tell the engine; into the void where it has ended."""
        if self._transport is not None and not self.ended.is_set():
            self._transport.write(encode(message))

    def kill(self, reason: str) -> None:
        """End the process now, even if it is stopped. `reason` is what `exit_reason` will say."""
        self._failure = Failed(reason)
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """End the process: it leaves by itself when the socket closes, and is killed where it does not."""
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        if self._reaper is not None:
            self._reaper.cancel()
            await self._reaper

    async def exit_reason(self) -> EngineDeadError | ConfigError:
        """Why the process ended, in words for the operator. To be asked after `ended`."""
        if self._failure is not None:
            if self._failure.is_config:
                return ConfigError(self._failure.message, self._failure.param)
            return EngineDeadError(self._failure.message)
        assert self._process is not None
        try:
            code = await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            return EngineDeadError("the engine process closed its socket")
        by_signal = f"was ended by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
        return EngineDeadError(f"the engine process {by_signal}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's: the socket is ours."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio's: bytes from the engine."""
        self.unheard = 0.0
        try:
            for payload in self._frames.feed(data):
                message = decode_from_engine(payload)
                if isinstance(message, Failed):
                    self._failure = message
                elif isinstance(message, Ready):
                    if not self.ready.done():
                        self.ready.set_result(message)
                else:
                    self._take(message)
        except (ValueError, msgspec.MsgspecError) as error:
            self.kill(f"the engine sent something unreadable: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's: the engine process has ended, or we closed."""
        self.ended.set()
        if not self.ready.done():
            self.ready.set_exception(EngineDeadError("the engine process ended while it was loading"))
            self.ready.exception()  # nobody has to look at it

    async def _notice_exit(self, process: asyncio.subprocess.Process) -> None:
        """A child of the engine may keep the socket open after it."""
        with contextlib.suppress(asyncio.CancelledError):
            await process.wait()
            await asyncio.sleep(0.2)  # for its last words, which are in the socket
            if self._transport is not None:
                self._transport.abort()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"
