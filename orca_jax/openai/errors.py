"""Errors in OpenAI's shape."""

import msgspec
from starlette.responses import Response

from orca_jax.link.errors import CallTooLarge, LinkError, Overloaded, TimedOut

MAX_MESSAGE = 600  # characters: an error may quote what the client sent, but not all of it
RETRY_SECONDS = 1  # least wait that a refused client is told; clients double it by themselves
NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients repeat 408, 409, 429 and 5xx unless told
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ErrorBody(msgspec.Struct, frozen=True):
    """All four keys, always."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """What a client parses."""

    error: ErrorBody


class ApiError(Exception):
    """An answer that is an error. `param` names the field to change.

    OpenAI's clients repeat 408, 409, 429 and 5xx unless `x-should-retry` says that it would be in vain; a 500 says so
    by itself, since it would end the same way again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        self.param = param
        self.code = code
        self.headers = headers or (NO_RETRY if status == 500 else {})

    def encode(self) -> bytes:
        """The JSON body."""
        kind = "server_error" if self.status >= 500 else _KINDS.get(self.status, "invalid_request_error")
        return msgspec.json.encode(ErrorEnvelope(ErrorBody(_sane(self.message), kind, self.param, self.code)))

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.encode(), self.status, self.headers, media_type="application/json")


def engine_gone(message: str) -> ApiError:
    """503: nothing was wrong with the request; another replica, or this one later, may answer."""
    return ApiError(503, message, code="engine_unavailable", headers={"retry-after": "5"})


def api_error(error: LinkError, overload_status: int) -> ApiError:
    """The answer to a call that the engine did not answer; `overload_status` is for a full queue."""
    retry = {"retry-after": str(RETRY_SECONDS)}
    match error:
        case CallTooLarge():
            return ApiError(400, error.message, error.param, code="call_too_large")
        case Overloaded():
            return ApiError(overload_status, error.message, code=error.code, headers=retry)
        case TimedOut(code="queue_timeout"):  # another replica may have room
            return ApiError(503, error.message, code=error.code, headers=retry)
        case TimedOut():  # it would take too long again
            return ApiError(408, error.message, code=error.code, headers=NO_RETRY)
    return engine_gone(error.message)


def _sane(text: str) -> str:
    """The text without halves of surrogate pairs, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()
