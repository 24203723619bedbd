"""API errors in OpenAI's format."""

import re
from collections.abc import Mapping

import msgspec

from orca_jax.link.errors import CallTooLarge, LinkError, Overloaded, TimedOut

MAX_MESSAGE = 600  # characters: limits the part of a client's input that an error quotes
TOO_LONG = "context_length_exceeded"  # code of a prompt that leaves no room for an answer
RETRY_SECONDS = 1  # retry-after of a refused call; client libraries increase it by themselves
# else OpenAI's client libraries repeat 408, 409, 429 and 5xx
NO_RETRY = {"x-should-retry": "false"}
_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ErrorBody(msgspec.Struct, frozen=True):
    """The fields of an error. All four keys are always present."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, frozen=True):
    """The JSON body of an error."""

    error: ErrorBody


class ApiError(Exception):
    """An error as the answer to a call. `param` names the field to change.

    OpenAI's client libraries repeat 408, 409, 429 and 5xx unless the header `x-should-retry` is "false". A 500 gets
    this header by default, because a repetition would fail in the same way.
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

    def rename(self, names: Mapping[str, str]) -> None:
        """Put the names of an API in the place of paths."""
        if self.param is not None:
            first = re.split(r"[.\[]", self.param, maxsplit=1)[0]
            self.param = names.get(first, self.param)
        self.message = _with_names(self.message, names)

    def encode(self) -> bytes:
        """The error as a JSON body."""
        kind = (
            "server_error"
            if self.status >= 500
            else _KINDS.get(self.status, "invalid_request_error")
        )
        return msgspec.json.encode(
            ErrorEnvelope(ErrorBody(sane(self.message), kind, self.param, self.code))
        )


class PromptTooLong(ApiError):
    """A prompt that leaves no token of the context for the answer.

    Args:
        message: the error in OpenAI's format.
        param: the field with the prompt.
        num_tokens: length of the prompt.
        maximum: length of the longest prompt.
        remark: about `num_tokens`, for formats with another message.
    """

    def __init__(
        self, message: str, param: str | None, num_tokens: int, maximum: int, remark: str = ""
    ) -> None:
        super().__init__(400, message, param, code="context_length_exceeded")
        self.num_tokens = num_tokens
        self.maximum = maximum
        self.remark = remark

    def add_remark(self, remark: str) -> None:
        """Add a remark to the message."""
        self.message += f"; {remark}"
        self.remark += f"; {remark}"


def named(path: str, names: Mapping[str, str]) -> str:
    """The name of a path in an API. What the table does not know stays, such as the place in a schema."""
    return _with_names(path, names, 1)


def _with_names(text: str, names: Mapping[str, str], most: int = 0) -> str:
    """The text with names for the paths in it, for the first `most` of them; 0 for all."""
    if not names:
        return text
    known = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    return known.sub(lambda found: names[found[0]], text, most)


def engine_gone(message: str) -> ApiError:
    """A 503: the request was valid, and another replica may answer it, or this one later."""
    return ApiError(503, message, code="engine_unavailable", headers={"retry-after": "5"})


def api_error(error: LinkError, overload_status: int) -> ApiError:
    """The API error for an error of the link. `overload_status` is the status for a full queue."""
    retry = {"retry-after": str(RETRY_SECONDS)}
    match error:
        case CallTooLarge():
            return ApiError(400, error.message, error.param, code="call_too_large")
        case Overloaded():
            return ApiError(overload_status, error.message, code=error.code, headers=retry)
        case TimedOut(code="queue_timeout"):  # another replica may be less loaded
            return ApiError(503, error.message, code=error.code, headers=retry)
        case TimedOut():  # a repetition would take too long again
            return ApiError(408, error.message, code=error.code, headers=NO_RETRY)
    return engine_gone(error.message)


def sane(text: str) -> str:
    """The text with lone surrogates replaced, since UTF-8 cannot encode them."""
    return text.encode("utf-8", "replace").decode()
