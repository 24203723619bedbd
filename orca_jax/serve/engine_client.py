"""The front end's handle on the engine process: starts it, routes its updates, notices its end."""

import asyncio
import itertools
import signal
import socket
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self

import msgspec

from orca_jax.config import EngineConfig
from orca_jax.errors import ConfigError, EngineDeadError, EngineError
from orca_jax.request import RequestUpdate, SamplingParams
from orca_jax.serve.wire import (
    Abort,
    Failed,
    FrameReader,
    FromEngine,
    Message,
    Ready,
    Rejected,
    Start,
    Submit,
    Updates,
    decode_from_engine,
    encode,
)

CLOSE_SECONDS = 3.0  # from goodbye to kill

State = Literal["loading", "ready", "stopping", "dead"]


class Mailbox:
    """What the engine sends for the requests of one HTTP call, numbered in the call's order.

    An async context manager: leaving it aborts the requests that have not ended.
    """

    def __init__(self, client: "EngineClient", request_ids: Sequence[str]) -> None:
        self._client = client
        self._ids = tuple(request_ids)
        self._items: list[tuple[int, RequestUpdate | Rejected]] = []
        self._error: Exception | None = None
        self._news = asyncio.Event()

    async def receive(self) -> list[tuple[int, RequestUpdate | Rejected]]:
        """Wait for news and take all there is: what came together is handled together.

        Raises:
            Exception: whatever `fail` was given, after the updates before it.
        """
        await self._news.wait()
        if not self._items and self._error is not None:
            raise self._error
        items, self._items = self._items, []
        if self._error is None:
            self._news.clear()
        return items

    def deliver(self, index: int, item: RequestUpdate | Rejected) -> None:
        """Called by the client, in the engine's order."""
        self._items.append((index, item))
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End the wait: the engine died, the server stops, or the caller hung up. The first error counts."""
        if self._error is None:
            self._error = error
            self._news.set()

    def abort(self, index: int) -> None:
        """End one request; nothing more comes for it."""
        self._client.abort(self._ids[index])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for request_id in self._ids:
            self._client.abort(request_id)


class EngineClient(asyncio.Protocol):
    """One engine process. All methods belong to one event loop.

    `ready` resolves when the engine serves and fails with `ConfigError` or `EngineDeadError` when it never will;
    `dead` is set when the process has gone, whoever wanted that.
    """

    def __init__(self) -> None:
        self.state: State = "loading"
        self.running = 0  # requests, as the engine last said
        self.waiting = 0
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.dead = asyncio.Event()
        self._frames = FrameReader()
        self._routes: dict[str, tuple[Mailbox, int]] = {}
        self._numbers = itertools.count()
        self._failure: Failed | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, config: EngineConfig) -> None:
        """Start the process and tell it what to build."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "orca_jax.serve.engine_process", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,  # ours is for the address and the curl line
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in a terminal is the front end's to handle
            )
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=ours)
        self._send(Start(config))

    def open(self, requests: Sequence[tuple[list[int], SamplingParams]]) -> Mailbox:
        """Submit the requests of one call.

        Raises:
            EngineDeadError: the engine does not serve.
        """
        if self.state != "ready":
            raise self._gone()
        ids = [f"r{next(self._numbers)}" for _ in requests]
        mailbox = Mailbox(self, ids)
        for index, (request_id, (prompt_ids, params)) in enumerate(zip(ids, requests, strict=True)):
            self._routes[request_id] = (mailbox, index)
            self._send(Submit(request_id, prompt_ids, params))
        return mailbox

    def abort(self, request_id: str) -> None:
        """End a request if it is open; nothing more comes for it."""
        if self._routes.pop(request_id, None) is not None and not self.dead.is_set():
            self._send(Abort(request_id))

    def stop(self) -> None:
        """End all open requests with an error and take no more."""
        if self.state != "dead":
            self.state = "stopping"
        self._fail_all(self._gone())

    async def close(self) -> None:
        """End the process: it leaves by itself when the socket closes, and is killed where it does not."""
        self.stop()
        if self._transport is not None:
            self._transport.close()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), CLOSE_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's: the socket is ours."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio's: bytes from the engine."""
        try:
            for payload in self._frames.feed(data):
                self._take(decode_from_engine(payload))
        except (ValueError, msgspec.MsgspecError) as error:
            self._failure = Failed(f"the engine sent something unreadable: {error}")
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's: the engine process has ended, or we closed."""
        if self.state != "stopping":
            self.state = "dead"
        self.dead.set()
        self._fail_all(self._gone())
        if not self.ready.done():
            self.ready.set_exception(self._reason())
            self.ready.exception()  # nobody has to look at it

    async def exit_reason(self) -> str:
        """Why the process ended, in words for the operator."""
        if self._failure is not None:
            return self._failure.message
        assert self._process is not None
        code = await self._process.wait()
        return (
            f"the engine process was ended by {signal.Signals(-code).name}"
            if code < 0
            else (f"the engine process ended with code {code}")
        )

    def _take(self, message: FromEngine) -> None:
        match message:
            case Updates(updates, running, waiting):
                self.running, self.waiting = running, waiting
                for update in updates:
                    self._deliver(update, is_last=update.finish_reason is not None)
            case Rejected():
                self._deliver(message, is_last=True)
            case Ready():
                if self.state == "loading":
                    self.state = "ready"
                    self.ready.set_result(message)
            case Failed():
                self._failure = message

    def _deliver(self, item: RequestUpdate | Rejected, is_last: bool) -> None:
        route = self._routes.pop(item.request_id, None) if is_last else self._routes.get(item.request_id)
        if route is not None:  # else it was aborted, and this was already on its way
            mailbox, index = route
            mailbox.deliver(index, item)

    def _fail_all(self, error: Exception) -> None:
        for mailbox, _ in self._routes.values():
            mailbox.fail(error)

    def _gone(self) -> EngineDeadError:
        words = {"loading": "the model is still loading", "stopping": "the server is shutting down"}
        return EngineDeadError(words.get(self.state, "the engine has ended"))

    def _reason(self) -> ConfigError | EngineError:
        failure = self._failure
        if failure is not None and failure.is_config:
            return ConfigError(failure.message, failure.param)
        return EngineDeadError(failure.message if failure else "the engine process ended while it was loading")

    def _send(self, message: Message) -> None:
        assert self._transport is not None, "the engine was not started"
        self._transport.write(encode(message))
