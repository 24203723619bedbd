"""One HTTP call to a server: bytes out, and received bytes with their times.

Nothing is parsed while calls are open, so that the client's work does not delay the times of other calls.
"""

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

_DONE = (b"\ndata: [DONE]", b"\ndata:[DONE]")
_OVERLAP = max(map(len, _DONE)) - 1


@dataclass(frozen=True)
class Address:
    """The address of a server; `host` is an IP address, so that no call waits for a name server."""

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    name: str | None = None  # the host name in the certificate


@dataclass
class Exchange:
    """One call. Times are in seconds, monotonic; `due` is the scheduled one, and `sent` that of its first action."""

    due: float
    sent: float
    connected: float | None = None
    arrivals: Sequence[tuple[float, bytes]] = ()
    failure: str = ""  # "timeout", "connect" or "stream_cut"
    detail: str = ""
    ended: float = 0.0


@dataclass
class _Receiver(asyncio.Protocol):
    """Sends one request and keeps the answer, until the server closes the connection or the stream says it is done."""

    request: bytes
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)
    closed: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    _tail: bytes = b""
    _transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.monotonic(), data))
        seen = self._tail + data
        if any(mark in seen for mark in _DONE):
            assert self._transport is not None
            self._transport.close()  # some servers keep it open in spite of "connection: close"
        self._tail = seen[-_OVERLAP:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self.closed.done():
            return
        if exc is None:
            self.closed.set_result(None)
        else:
            self.closed.set_exception(exc)


async def exchange(address: Address, request: bytes, due: float, timeout: float) -> Exchange:
    """Send a request on its own connection, and wait for the end of the answer. Failures are in the result."""
    call = Exchange(due, time.monotonic())
    receiver = _Receiver(request)
    transport: asyncio.Transport | None = None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            transport, _ = await loop.create_connection(
                lambda: receiver,
                address.host,
                address.port,
                ssl=address.tls,
                server_hostname=address.name,
            )
            call.connected = time.monotonic()
            await receiver.closed
    except TimeoutError:
        call.failure = "timeout"
        call.detail = f"the answer was not complete after {timeout:g} s"
    except OSError as error:
        call.failure = "connect" if call.connected is None else "stream_cut"
        call.detail = error.strerror or str(error) or type(error).__name__
    finally:
        if transport is not None:
            transport.abort()
    call.ended = time.monotonic()
    call.arrivals = receiver.arrivals
    return call
