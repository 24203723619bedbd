"""Whether an answer is in OpenAI's shape: `check_response` reads one whole HTTP answer, streams included.

Fields and types are in `shape_structs.py`; what structs cannot say is in `shape_rules.py` for a choice, in
`shape_streams.py` for streams, and here for what depends on the status and the route.
"""

import json
from collections.abc import Mapping
from typing import Any

from tests.openai.shape_rules import check_chat, check_completion
from tests.openai.shape_streams import check_chat_stream, check_completion_stream
from tests.openai.shape_structs import (
    ChatCompletion,
    Completion,
    ErrorEnvelope,
    ModelCard,
    ModelList,
    Shape,
    ShapeError,
    SystemOneError,
    Text,
    Tokens,
    decode,
    require,
)

__all__ = ["ShapeError", "check_response"]

# a 503 of these is an answer, not an error
PROBES = ("/live", "/ready", "/health", "/health_generate")
KINDS: Mapping[str, type[Shape]] = {
    "/v1/models": ModelList,
    "/tokenize": Tokens,
    "/detokenize": Text,
}


def check_response(
    method: str,
    path: str,
    request_body: bytes,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    complete: bool = True,
) -> None:
    """Hold one answer to OpenAI's shapes.

    Args:
        method: of the request.
        path: of the request, with or without a query.
        request_body: as sent; what it asked for decides which keys belong into the answer.
        status: of the answer.
        headers: of the answer.
        body: of the answer, without HTTP's own framing.
        complete: False where the client hung up before the end; then nothing is said about the end.

    Raises:
        ShapeError: the answer is not in shape; the message says where.
    """
    path = path.partition("?")[0]
    named = {name.lower(): value for name, value in headers.items()}
    require(named.get("x-request-id"), f"{method} {path}: no x-request-id")
    if method in ("HEAD", "OPTIONS") or not (complete or body):
        return
    # Calls about models have Anthropic's format too, if they come from its clients.
    is_anthropic = path.startswith("/v1/models") and (
        b'"request_id"' in body or b'"lifecycle"' in body
    )
    if path.startswith("/v1/messages") or is_anthropic:
        # the SDK takes a second to import
        from tests.openai.messages.sdk_shapes import check_messages_response

        check_messages_response(path, asked(request_body), status, named, body, complete)
        return
    if status >= 400 and path == "/v1/systemone":
        decode(SystemOneError, body, f"{status} of {path}")
    elif status >= 400:
        check_error(path, status, named, body)
    else:
        check_success(method, path, request_body, named, body, complete)


def asked(request_body: bytes) -> dict[str, Any]:
    """The request as a dictionary without what was given as null; empty where it is none."""
    try:
        value = json.loads(request_body)
    except (ValueError, RecursionError):
        return {}
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else {}


def check_error(path: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """An answer of 400 and above. Raises ShapeError."""
    if path in PROBES and status == 503:
        return
    where = f"{status} of {path}"
    require(is_json(headers), f"{where}: content-type is {headers.get('content-type')}")
    error = decode(ErrorEnvelope, body, where).error
    if status == 401:
        require(error.type == "authentication_error", f"{where}: type is {error.type}")
        require("www-authenticate" in headers, f"{where}: no www-authenticate")
    elif status >= 500:
        require(error.type == "server_error", f"{where}: type is {error.type}")
    elif status != 429:
        require(error.type == "invalid_request_error", f"{where}: type is {error.type}")
    if status in (429, 503):
        require(headers.get("retry-after", "").isdecimal(), f"{where}: no retry-after in seconds")


def check_success(
    method: str,
    path: str,
    request_body: bytes,
    headers: Mapping[str, str],
    body: bytes,
    complete: bool,
) -> None:
    """An answer below 400. Raises ShapeError."""
    request = asked(request_body)
    where = f"{method} {path}"
    if path in ("/v1/completions", "/v1/chat/completions") and request.get("stream"):
        kind = headers.get("content-type", "")
        require(
            kind.startswith("text/event-stream"), f"{where}: content-type of a stream is {kind}"
        )
        check = check_chat_stream if "chat" in path else check_completion_stream
        check(request, body, complete)
    elif path.startswith("/v1/responses") and complete:
        from tests.openai.responses.played import check_answer  # the SDK takes a second to import

        check_answer(method, path, request, body)
    elif not complete:
        return  # half a JSON document
    elif path == "/v1/completions":
        require(is_json(headers), f"{where}: content-type is {headers.get('content-type')}")
        check_completion(request, decode(Completion, body, where))
    elif path == "/v1/chat/completions":
        require(is_json(headers), f"{where}: content-type is {headers.get('content-type')}")
        check_chat(request, decode(ChatCompletion, body, where))
    elif path.startswith("/v1/models/"):
        decode(ModelCard, body, where)
    elif path in KINDS:
        decode(KINDS[path], body, where)


def is_json(headers: Mapping[str, str]) -> bool:
    """Whether the answer says that it is JSON."""
    return headers.get("content-type", "").partition(";")[0].strip() == "application/json"
