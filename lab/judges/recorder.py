"""A recording proxy between a client and the server: passes all bytes on, and calls a check with every response.

Bytes go through unchanged and at once: streams, disconnects and malformed requests arrive as they were sent. HTTP is
parsed on the side. The proxy listens on a loopback port and runs in a thread.
"""

import asyncio
import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import chain

import h11

CHUNK = 2**16
CLOSE_SECONDS = 2


@dataclasses.dataclass
class Exchange:
    """One request and its response. `complete` is False if the connection ended in the middle of the response."""

    method: str
    target: str
    request_body: bytearray
    status: int = 0
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    body: bytearray = dataclasses.field(default_factory=bytearray)
    complete: bool = False


class Reader:
    """Parses both directions of one connection, and calls `done` with every exchange.

    Two parsers of HTTP mirror each other: `_requests` is a server and reads from the client, `_answers` is a client
    and reads from the server. Each request read by one is sent by the other, as the framing of HTTP responses depends
    on their requests.
    """

    def __init__(self, done: Callable[[Exchange], None]) -> None:
        self._done = done
        self._requests = h11.Connection(h11.SERVER, max_incomplete_event_size=2**26)
        self._answers = h11.Connection(h11.CLIENT, max_incomplete_event_size=2**20)
        self._now: Exchange | None = None
        self._is_over = False  # no further request is possible on this connection

    def sent(self, data: bytes) -> None:
        """Read bytes from the client. Raises h11.ProtocolError."""
        if not self._is_over:
            self._requests.receive_data(data)
            self._read_requests()

    def came(self, data: bytes) -> None:
        """Read bytes from the server; empty if it closed the connection. Raises h11.ProtocolError."""
        if self._is_over:
            return
        self._answers.receive_data(data)
        while isinstance(event := self._answers.next_event(), h11.Event):
            if isinstance(event, h11.ConnectionClosed):
                return
            self._take(event)

    def closed(self) -> None:
        """End of the connection: a response that had begun is delivered incomplete."""
        if self._now is not None and self._now.status:
            self._done(self._now)
        self._now = None
        self._is_over = True

    def _read_requests(self) -> None:
        while isinstance(event := self._requests.next_event(), h11.Event):
            if isinstance(event, h11.ConnectionClosed):
                return
            if isinstance(event, h11.Request):
                self._now = Exchange(
                    event.method.decode(), event.target.decode("latin-1"), bytearray()
                )
            elif isinstance(event, h11.Data) and self._now is not None:
                self._now.request_body += event.data
            self._answers.send(event)
            self._end_if_both_did()

    def _take(self, event: h11.Event) -> None:
        now = self._now
        if now is None:
            raise h11.LocalProtocolError("a response without a request")
        if isinstance(event, h11.Response):
            now.status = event.status_code
            now.headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
        elif isinstance(event, h11.Data):
            now.body += event.data
        elif isinstance(event, h11.EndOfMessage):
            now.complete = True
            self._end_if_both_did()

    def _end_if_both_did(self) -> None:
        """Deliver an exchange once its request and its response are complete; the response may end first.

        Then prepare for another request, if this connection can carry one.
        """
        now = self._now
        if now is None or not now.complete or self._requests.their_state is h11.SEND_BODY:
            return
        self._now = None
        self._done(now)
        self._requests.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        self._requests.send(h11.EndOfMessage())
        sides = (self._requests, self._answers)
        states = chain.from_iterable((side.our_state, side.their_state) for side in sides)
        self._is_over = any(state is not h11.DONE for state in states)
        if not self._is_over:
            for side in sides:
                side.start_next_cycle()
            self._read_requests()


class Recorder:
    """The proxy: listens, passes bytes on, and collects the results of the check."""

    def __init__(self, port: int, check: Callable[[Exchange], None]) -> None:
        self._target = port
        self._check = check
        self._lock = threading.Lock()
        self.statuses: collections.Counter[int] = collections.Counter()  # of the recorded responses
        self.num_unread = 0  # connections without valid HTTP, which cannot be recorded
        self.violations: list[str] = []
        self.port = 0

    @contextlib.contextmanager
    def running(self) -> Iterator["Recorder"]:
        """Listen while the block runs."""
        loop = asyncio.new_event_loop()
        server = loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        thread = threading.Thread(target=loop.run_forever, name="recorder")
        thread.start()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._stop(server), loop).result(30)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    async def _stop(self, server: asyncio.Server) -> None:
        server.close()
        open_tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if open_tasks:  # connections closed by both sides end by themselves
            _, open_tasks = await asyncio.wait(open_tasks, timeout=CLOSE_SECONDS)
        for task in open_tasks:
            task.cancel()
        await asyncio.gather(*open_tasks, return_exceptions=True)

    async def _connected(
        self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter
    ) -> None:
        try:
            server_in, server_out = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            client_out.close()  # as a stopped server would
            return
        aside = _Aside(Reader(self._record))
        there = asyncio.create_task(_pump(client_in, server_out, aside.sent))
        back = asyncio.create_task(_pump(server_in, client_out, aside.came))
        try:
            await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (there, back):
                task.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
            aside.closed()
            self.num_unread += aside.is_lost
            for writer in (server_out, client_out):
                writer.close()

    def _record(self, exchange: Exchange) -> None:
        violation = None
        try:
            self._check(exchange)
        except AssertionError as error:
            violation = f"{exchange.method} {exchange.target} {bytes(exchange.request_body[:300])!r}: {error}"
        with self._lock:
            self.statuses[exchange.status] += 1
            if violation is not None:
                self.violations.append(violation)


class _Aside:
    """A reader that stops at bytes that are not HTTP, without an effect on the connection."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.is_lost = False

    def sent(self, data: bytes) -> None:
        self._try(lambda: self._reader.sent(data))

    def came(self, data: bytes) -> None:
        self._try(lambda: self._reader.came(data))

    def closed(self) -> None:
        self._try(self._reader.closed)

    def _try(self, read: Callable[[], None]) -> None:
        if not self.is_lost:
            try:
                read()
            except h11.ProtocolError:
                self.is_lost = True


async def _pump(
    source: asyncio.StreamReader, sink: asyncio.StreamWriter, see: Callable[[bytes], None]
) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await source.read(CHUNK):
            see(data)
            sink.write(data)
            await sink.drain()
