"""One HTTP connection: uvicorn's, with time limits for slow peers and with errors in OpenAI's format."""

import asyncio
import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from orca_jax.serve.handlers import error_response
from orca_jax.serve.openai.errors import NO_RETRY, ApiError
from orca_jax.serve.request_context import NO_SNIFFING

MAX_HEADER_BYTES = 64 * 2**10
IDLE_DRAIN_SECONDS = 0.5  # at the server's end, for idle clients to read the bytes already written
_SLICE = 4 * 2**10  # bytes: the precision of the limit on headers

logger = logging.getLogger(__name__)


def connection_class(
    read_timeout: float, write_timeout: float, idle: "IdleConnections"
) -> Callable[..., "Connection"]:
    """A protocol class for uvicorn, with these limits in seconds. Connections without a request are in `idle`."""
    return functools.partial(
        Connection, read_timeout=read_timeout, write_timeout=write_timeout, idle=idle
    )


class IdleConnections:
    """The connections without a request, or with incomplete headers.

    Attributes:
        on_change: called with a connection that becomes idle (also a new one) or is lost; None while there is room.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[Connection], object] | None = None
        self._idle: dict[Connection, None] = {}  # the longest idle one first

    def update(self, connection: "Connection", *, is_idle: bool) -> None:
        """Take the state of a connection. One that stays idle keeps its place."""
        if not is_idle:
            self._idle.pop(connection, None)
        elif connection not in self._idle:
            self._idle[connection] = None
            self._changed(connection)

    def lost(self, connection: "Connection") -> None:
        """Forget a connection."""
        self._idle.pop(connection, None)
        self._changed(connection)

    def longest(self) -> "Connection | None":
        """Remove the connection that has been idle for longest, and return it."""
        connection = next(iter(self._idle), None)
        if connection is not None:
            del self._idle[connection]
        return connection

    def _changed(self, connection: "Connection") -> None:
        if self.on_change is not None:
            self.on_change(connection)


class _StrictParser(h11.Connection):
    """h11's parser with further rules of RFC 9112."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            _check(event)
        return event


def _check(request: h11.Request) -> None:
    """Refuse another major version, and an ambiguous length: a proxy could see two requests in one (6.1)."""
    if not request.http_version.startswith(b"1."):
        raise h11.RemoteProtocolError("another major version of HTTP", error_status_hint=505)
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and (
        b"content-length" in names or request.http_version < b"1.1"
    ):
        raise h11.RemoteProtocolError("Transfer-Encoding with Content-Length or in HTTP/1.0")


class Connection(H11Protocol):
    """One HTTP connection.

    A request must arrive completely within `read_timeout` after its first byte; for the first request the time counts
    from the start of the connection. While bytes wait to be sent, the peer must accept some of them within each
    `write_timeout`. Otherwise the connection is cut and its request ends.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        read_timeout: float,
        write_timeout: float,
        idle: IdleConnections,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = _StrictParser(h11.SERVER, MAX_HEADER_BYTES)
        self._idle = idle
        self._read_timeout = read_timeout
        self._write_timeout = write_timeout
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Buffer nothing beyond the kernel's buffer: `send` waits, and asyncio reports every stuck byte.
        transport.set_write_buffer_limits(high=1, low=0)
        self._read_timer = self.loop.call_later(self._read_timeout, self._read_too_slow)
        self._idle.update(self, is_idle=True)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes, headers in slices: h11 checks the length of incomplete headers only."""
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(self._read_timeout, self._read_too_slow)
        while (
            len(data) > _SLICE
            and self.conn.their_state is h11.IDLE
            and not self.transport.is_closing()
        ):
            super().data_received(data[:_SLICE])
            data = data[_SLICE:]
        if not self.transport.is_closing():
            super().data_received(data)
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_read_timer()
        self._idle.update(self, is_idle=self.conn.their_state is h11.IDLE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_read_timer()
        self._stop_write_timer()
        self._unset_keepalive_if_required()  # uvicorn forgets it after a reset by the peer
        super().connection_lost(exc)
        self._idle.lost(self)

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def shutdown(self) -> None:
        """Close the connection at the server's end; abort an idle one, whose client may never finish TLS."""
        is_idle = self.conn.our_state in (h11.IDLE, h11.DONE)
        super().shutdown()
        if is_idle:
            self.loop.call_later(IDLE_DRAIN_SECONDS, self._abort_if_sent)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def on_response_complete(self) -> None:
        """Stop the timer after an answer, unless part of the next request has arrived already."""
        super().on_response_complete()
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_read_timer()
        self._idle.update(
            self, is_idle=self.conn.their_state is h11.IDLE and not self.transport.is_closing()
        )

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not valid HTTP; uvicorn calls this in its `except` block."""
        error = sys.exception()
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if status == 431:
            message = f"the headers exceed {MAX_HEADER_BYTES} bytes"
            self._answer(ApiError(431, message, code="headers_too_large"))
        elif status == 505:
            self._answer(
                ApiError(505, "the version must be HTTP/1.1", code="http_version_not_supported")
            )
        else:
            self._answer(ApiError(400, "not a valid HTTP/1.1 request", code="invalid_http"))

    def _read_too_slow(self) -> None:
        self._read_timer = None
        is_silent = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if is_silent:
            self.transport.close()
        else:
            message = f"the request did not arrive within {self._read_timeout:g} s"
            self._answer(ApiError(408, message, code="request_timeout", headers=NO_RETRY))

    def _answer(self, error: ApiError) -> None:
        """Send the error if no answer has begun, and close the connection."""
        # None before the first request
        cycle: RequestResponseCycle | None = getattr(self, "cycle", None)
        is_open = cycle is not None and not cycle.response_complete
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and not self.transport.is_closing():
            scope = dict(cycle.scope) if cycle is not None and is_open else None
            body = error.encode() if scope is None else bytes(error_response(error, scope).body)
            extra = {
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
            }
            headers = [*self.server_state.default_headers, NO_SNIFFING]
            headers += [
                (name.encode(), value.encode())
                for name, value in {**error.headers, **extra}.items()
            ]
            start = h11.Response(
                status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status]
            )
            for event in (start, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        if cycle is not None and is_open:
            # The handler may be about to answer, too: for it the peer has gone, and its answer is dropped.
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    def _abort_if_sent(self) -> None:
        if self.transport.get_write_buffer_size() == 0:
            self.transport.abort()

    def _watch_writing(self, stuck: int) -> None:
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self._write_timeout, self._check_writing, stuck)

    def _check_writing(self, stuck: int) -> None:
        size = self.transport.get_write_buffer_size()
        if 0 < stuck <= size:
            logger.info(
                "closed a connection: the client read nothing for %g s (--write-timeout)",
                self._write_timeout,
            )
            self.transport.abort()
        else:
            self._watch_writing(size)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: clients that offer HTTP/2 are answered in HTTP/1.1."""
