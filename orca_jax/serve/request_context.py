"""Middleware around every HTTP call: request id, metrics, a log line, an answer after a crash, names of the server."""

import logging
import re
import time
import uuid
from collections.abc import Collection
from ipaddress import ip_address

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orca_jax.serve.handlers import error_response
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.telemetry.observer import ServerObserver

METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
NO_ROUTE = "none"  # for calls refused before the router or unknown to it
PROBES = frozenset({"/live", "/ready", "/health", "/metrics"})  # called every few seconds
# browsers take answers as the type that they have
NO_SNIFFING = (b"x-content-type-options", b"nosniff")
HUNG_UP = 499  # nginx's status for a client that hung up before the answer
_CLIENT_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
# of the header Host: a name, maybe with a port
_HOST = re.compile(r"(?P<name>\[[^\[\]/@]+\]|[^\[\]/@:]+)(?::\d*)?")
_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_HOST.pattern}", re.IGNORECASE)

logger = logging.getLogger(__name__)


class RequestContext:
    """ASGI middleware, the outermost one.

    The request id is the client's `x-request-id` if that is well-formed, otherwise a new one. Handlers find it in
    `scope["state"]["request_id"]`, beside `"caller"`: an id of the API key, the same for all calls with one key while
    the server runs, and None without keys.
    """

    def __init__(self, app: ASGIApp, observer: ServerObserver) -> None:
        self._app = app
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {}).update(request_id=request_id, caller=None)
        with (
            structlog.contextvars.bound_contextvars(request_id=request_id),
            self._observer.continued_trace(scope["headers"]),
        ):
            await _HttpExchange(self._observer, scope, send, request_id).run(self._app, receive)


class HostCheck:
    """ASGI middleware against DNS rebinding: refuses calls to other names of this machine than `names`.

    A web page whose name is changed to the address of this machine is of the same origin as the server for the browser.
    It could call a server without keys and read the answers. The browser still sends the name in `Host` and `Origin`.

    IP addresses and `localhost` are always allowed, since no DNS server decides about them. Case, ports and a dot at
    the end do not count. A call without `Host` (HTTP/1.0) passes, since browsers always send one.

    Args:
        app: the application behind it.
        names: host names, allowed in `Host` and `Origin`.
        origins: allowed values of `Origin` with any host; `*` allows all.
    """

    def __init__(self, app: ASGIApp, names: Collection[str], origins: Collection[str] = ()) -> None:
        self._app = app
        self._names = {_plain(name) for name in (*names, "localhost")}
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            refusal = self._refusal(scope)
            if refusal is not None:
                app = error_response(refusal, scope)
        await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        for key, value in scope["headers"]:
            text = value.decode("latin-1").strip()
            match key.lower():
                case b"host" if not self._allows(_HOST, text):
                    remedy = "add its host name to --allowed-hosts"
                case b"origin" if not (self._origins & {"*", text} or self._allows(_ORIGIN, text)):
                    remedy = "add its host name to --allowed-hosts, or the whole origin to --allowed-origins"
                case _:
                    continue
            name = key.decode("latin-1").title()
            message = f"this server allows no calls with the {name} {text[:200]!r}; call it by IP address, or {remedy}"
            return ApiError(403, message, code="host_not_allowed")
        return None

    def _allows(self, pattern: re.Pattern[str], text: str) -> bool:
        found = pattern.fullmatch(text)
        if found is None:
            return False
        name = _plain(found["name"])
        return name in self._names or _is_address(name)


class WithoutLastSlash:
    """ASGI middleware: drops a slash at the end of a path, inside access control, which sees the path as it was sent.

    A redirect would do the same for fewer clients: many drop the body of a redirected POST.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # the root itself keeps its slash
        if len(scope.get("path", "")) > len(scope.get("root_path", "")) + 1:
            scope["path"] = scope["path"].removesuffix("/")
        await self._app(scope, receive, send)


class _HttpExchange:
    """One HTTP call, from its headers to its last byte."""

    def __init__(self, observer: ServerObserver, scope: Scope, send: Send, request_id: str) -> None:
        self._observer = observer
        self._scope = scope
        self._send = send
        self._id = (b"x-request-id", request_id.encode())
        self._status: int | None = None
        self._start = time.monotonic()

    async def run(self, app: ASGIApp, receive: Receive) -> None:
        """Answer the call, also after a crash, and count it."""
        self._observer.call_started()
        try:
            await app(self._scope, receive, self.send)
        except Exception:
            # Logged here: a log line of the HTTP server would lack the request id.
            logger.exception("a call crashed")
            if self._status is None:
                error = ApiError(500, "an internal error occurred", code="internal_error")
                await error_response(error, self._scope)(self._scope, receive, self.send)
        finally:
            self._count()

    async def send(self, message: Message) -> None:
        """Send a message of the answer, with the headers that all answers have: the request id and `NO_SNIFFING`."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            kept = [
                header
                for header in message.get("headers", ())
                if header[0].lower() != b"x-request-id"
            ]
            message["headers"] = [*kept, self._id, NO_SNIFFING]
        await self._send(message)

    def _count(self) -> None:
        seconds = time.monotonic() - self._start
        status = HUNG_UP
        if self._status is not None:
            status = self._status
        method = self._scope["method"]
        if method not in METHODS:
            method = "other"
        route = getattr(self._scope.get("route"), "path", NO_ROUTE)
        self._observer.call_ended(method, route, status, seconds)
        level = logging.DEBUG
        if self._observer.logs_requests and route not in PROBES:
            level = logging.INFO
        fields = {
            "method": method,
            "route": route,
            "status": status,
            "duration_ms": round(seconds * 1e3, 3),
        }
        logger.log(level, "answered", extra=fields)


def _request_id(scope: Scope) -> str:
    sent = [value for name, value in scope["headers"] if name.lower() == b"x-request-id"]
    if len(sent) == 1 and _CLIENT_ID.fullmatch(sent[0]):
        return str(sent[0], "ascii")
    return f"req_{uuid.uuid4().hex}"


def _plain(name: str) -> str:
    return name.strip("[]").lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
