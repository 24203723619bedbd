"""Access control: API keys on every route but a few, the names of the server, and the origins of web pages."""

import hmac
import logging
import os
import re
import secrets
import socket
import stat
from collections import Counter
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from pathlib import Path

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from orca_jax.serve.handlers import CUT_LIMIT, IGNORED_FIELDS, WEIGHT_VERSION, error_response
from orca_jax.serve.openai.errors import RETRY_SECONDS, ApiError
from orca_jax.serve.request_context import HostCheck
from orca_jax.server_config import ServerConfig
from orca_jax.values.errors import ConfigError, reason_of

OPEN_PATHS = frozenset({"/live", "/health"})  # for probes of load balancers without keys
ROOT = "/"  # open to HEAD: some clients look for a server there, without a key
KEY_HEADERS = ("x-api-key", "api-key")  # of Anthropic's and of Azure's clients
OPEN_METHODS = frozenset({"GET", "HEAD"})
_KEY_HEADERS = frozenset(name.encode() for name in KEY_HEADERS)
_KEY = re.compile(r"[!-~]+")  # characters that a header carries unchanged

logger = logging.getLogger(__name__)


class Access:
    """ASGI middleware: refuses calls without one of `keys`, except on `open_paths`; without keys it accepts all.

    Methods and paths in `own_keys` are passed on as well: their routes are behind an `Access` of their own.

    A key is in `Authorization: Bearer`; without this header it may be in one of `KEY_HEADERS`.

    It runs before the router, so it also guards routes added later and paths without a route. An accepted call
    carries the digest of its key in `scope["state"]["caller"]`. The digest reveals nothing about the key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        open_paths: Collection[str] = OPEN_PATHS,
        own_keys: Collection[tuple[str, str]] = (),
    ) -> None:
        self._app = app
        self._open_paths = open_paths
        self._own_keys = own_keys
        self._secret = secrets.token_bytes(32)
        self._digests = tuple(self._digest(key.encode()) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._digests or scope["type"] == "lifespan" or self._is_open(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send(
                {"type": "websocket.close", "code": 1008, "reason": "an API key is required"}
            )
        else:
            caller = self._caller(scope)
            if isinstance(caller, ApiError):
                await error_response(caller, scope)(scope, receive, send)
            else:
                scope.setdefault("state", {})["caller"] = caller
                await self._app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        """True if the router takes this call to an open route: the exact path, in no other spelling."""
        if scope["type"] != "http":
            return False
        method = scope["method"]
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if (method, path) in self._own_keys or (method == "HEAD" and path == ROOT):
            return True
        return method in OPEN_METHODS and path in self._open_paths

    def _caller(self, scope: Scope) -> str | ApiError:
        """The digest of the call's key, or the refusal."""
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if values:
            scheme, _, token = values[0].strip().partition(b" ")
            if len(values) > 1 or scheme.lower() != b"bearer":
                return _refuse("the Authorization header must be a single 'Bearer KEY'")
        else:
            tokens = {
                value.strip() for name, value in scope["headers"] if name.lower() in _KEY_HEADERS
            }
            if not tokens:
                return _refuse("no API key; send one in the header 'Authorization: Bearer KEY'")
            if len(tokens) > 1:
                return _refuse(f"the headers {' and '.join(KEY_HEADERS)} must have one key")
            (token,) = tokens
        presented = self._digest(token.strip())
        if not self._is_known(presented):
            return _refuse("the API key is not one of this server's")
        return presented.hex()

    def _is_known(self, presented: bytes) -> bool:
        """True for a key of this server. The time does not depend on the key or on the number of right characters."""
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(presented, digest)
        return found

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, "sha256")


class CallLimit:
    """ASGI middleware around the routes that cost work: refuses calls of a key that has `most` open ones.

    All `CallLimit`s of a server count in one `Counter`. A server without keys has one caller: an address stands for
    many callers behind a proxy, and one caller may have many addresses.
    """

    def __init__(self, app: ASGIApp, most: int, num_open: Counter[str | None]) -> None:
        self._app = app
        self._most = most
        self._num_open = num_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = scope["state"]["caller"]
        if self._num_open[caller] >= self._most:
            message = f"this key has {self._most} open calls, the most that --max-calls-per-key allows; try again later"
            headers = {"retry-after": str(RETRY_SECONDS)}
            refusal = ApiError(429, message, code="too_many_calls", headers=headers)
            await error_response(refusal, scope)(scope, receive, send)
            return
        self._num_open[caller] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open[caller] -= 1


def read_keys(config: ServerConfig) -> tuple[str, ...]:
    """The keys of `--api-key` and `--api-key-file`; empty if neither was given.

    Raises:
        ConfigError: a key is malformed, or the file cannot be read or holds no key. The message never shows a key.
    """
    keys = list(config.api_key)
    for key in keys:
        _check(key, "api_key", "--api-key")
    if config.api_key_file is not None:
        keys += read_key_file(Path(config.api_key_file), "api_key_file")
    return tuple(dict.fromkeys(keys))


def with_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """Allow pages of `--allowed-origins` to call the server. It wraps `Access`, so that pages can read a 401, too."""
    origins = config.allowed_origins
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),  # browser clients send a dozen of their own headers
        allow_credentials=config.allow_credentials,
        expose_headers=("x-request-id", "retry-after", IGNORED_FIELDS, CUT_LIMIT, WEIGHT_VERSION),
    )


def with_host_check(app: ASGIApp, config: ServerConfig, *, has_keys: bool) -> ASGIApp:
    """Check the names in `Host` and `Origin` if the server is on a loopback address and has no keys.

    `--allowed-hosts` turns the check on for every server on a port. A Unix socket cannot be reached by a web page. On
    other addresses clients use names that the server does not know, such as those of services in a cluster.
    """
    if config.uds is not None or not (
        config.allowed_hosts or (not has_keys and _is_on_loopback(config.host))
    ):
        return app
    return HostCheck(app, (config.host, *config.allowed_hosts), config.allowed_origins)


def _is_on_loopback(host: str) -> bool:
    """True if a server with `--host host` listens on a loopback address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:  # a replica may run on another machine than the listener
        return False
    return ip_address(found[0][4][0]).is_loopback


def _refuse(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def read_key_file(path: Path, param: str) -> list[str]:
    """The keys of a file, one per line. Raises ConfigError as `read_keys` does, with `param`."""
    flag = f"--{param.replace('_', '-')}"
    try:
        with path.open(encoding="utf-8-sig") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = [line.strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it is not valid UTF-8"
        raise ConfigError(f"{flag} {path} cannot be read: {reason}", param=param) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"{flag} {path} holds no key; write one key per line", param=param)
    for key in keys:
        _check(key, param, f"{flag} {path}")
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        logger.warning(
            "every user of this machine can read %s; run chmod 600 on it to keep its keys secret",
            path,
        )
    return keys


def _check(key: str, param: str, where: str) -> None:
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{where}: a key must consist of printable ASCII characters without spaces", param=param
        )
