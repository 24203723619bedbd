"""API errors in Anthropic's format, for its routes."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.serve.openai.errors import ApiError, PromptTooLong, sane
from orca_jax.serve.openai.schema.messages import THREAD

MESSAGES = "/v1/messages"
MODELS = "/v1/models"
VERSION_HEADER = "anthropic-version"
REQUEST_ID = "request-id"  # header of an answer: the clients show it with an error
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


class ErrorDetails(msgspec.Struct, frozen=True):
    """The code of an error that the clients treat by themselves, and what the server does not support."""

    error_code: str
    unsupported: list[str]


class MessagesErrorBody(msgspec.Struct, frozen=True):
    """The type of an error, and its text. `details` is left out of most."""

    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class MessagesError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The JSON body of an error, and the data of the event of an error."""

    error: MessagesErrorBody
    request_id: str


def encode_error(error: ApiError, request_id: str) -> bytes:
    """The JSON of an error in Anthropic's format."""
    message = error.message
    # clients look for this sentence, and shorten the conversation
    if isinstance(error, PromptTooLong):
        message = (
            f"prompt is too long: {error.num_tokens} tokens > {error.maximum} maximum{error.remark}"
        )
    kind = _TYPES.get(error.status, "invalid_request_error")
    details = ErrorDetails(THREAD, ["thread"]) if error.code == THREAD else UNSET
    return msgspec.json.encode(
        MessagesError(MessagesErrorBody(kind, sane(message), details), request_id)
    )


def is_anthropic(scope: Mapping[str, Any]) -> bool:
    """True for calls below `/v1/messages`, and for those about models by Anthropic's clients. `scope` is ASGI's."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    if _is_below(path, MESSAGES):
        return True
    return _is_below(path, MODELS) and has_version(scope)


def has_version(scope: Mapping[str, Any]) -> bool:
    """True if a call has the header that all clients of Anthropic send."""
    return any([name.lower() == VERSION_HEADER.encode() for name, _ in scope["headers"]])


def _is_below(path: str, route: str) -> bool:
    return path == route or path.startswith(f"{route}/")
