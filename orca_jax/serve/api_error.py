"""Errors in OpenAI's shape."""

import msgspec
from starlette.responses import Response

MAX_MESSAGE = 600  # characters: an error may quote what the client sent, but not all of it


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
    """An answer that is an error. `param` names the field to change."""

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
        self.headers = headers or {}

    def encode(self) -> bytes:
        """The JSON body."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return msgspec.json.encode(ErrorEnvelope(ErrorBody(self.message, kind, self.param, self.code)))

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.encode(), self.status, self.headers, media_type="application/json")


def engine_gone(message: str) -> ApiError:
    """503: nothing was wrong with the request; another replica, or this one later, may answer."""
    return ApiError(503, message, code="engine_unavailable", headers={"retry-after": "5"})
