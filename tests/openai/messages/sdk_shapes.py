"""Whether answers have the shape of the Anthropic SDK's own types: no missing field, and no key outside of them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import anthropic.types as sdk
import pydantic
from anthropic.pagination import SyncPage

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
EVENTS: Mapping[str, type[pydantic.BaseModel]] = {
    "message_start": sdk.RawMessageStartEvent,
    "content_block_start": sdk.RawContentBlockStartEvent,
    "content_block_delta": sdk.RawContentBlockDeltaEvent,
    "content_block_stop": sdk.RawContentBlockStopEvent,
    "message_delta": sdk.RawMessageDeltaEvent,
    "message_stop": sdk.RawMessageStopEvent,
}


def check_messages_response(
    path: str,
    request: dict[str, Any],
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    complete: bool = True,
) -> None:
    """Hold one answer in Anthropic's format to the SDK's types. Raises AssertionError."""
    if status >= 400:
        check_failure(status, headers, body)
    elif path == "/v1/models":
        check_models(json.loads(body))
    elif path.startswith("/v1/models/"):
        check_type(sdk.ModelInfo, json.loads(body))
    elif path.endswith("/count_tokens"):
        check_type(sdk.MessageTokensCount, json.loads(body))
    elif request.get("stream"):
        assert headers["content-type"].startswith("text/event-stream")
        check_stream(body.decode(), complete)
    elif complete:
        check_type(sdk.Message, json.loads(body))


def check_failure(status: int, headers: Mapping[str, str], body: bytes) -> dict[str, str]:
    """An answer of 400 and above; returns its error."""
    assert headers["content-type"] == "application/json"
    value = json.loads(body)
    assert value.keys() == {"type", "error", "request_id"} and value["type"] == "error", value
    assert (
        value["error"].keys() - {"details"} == {"type", "message"} and value["error"]["message"]
    ), value
    assert "details" not in value["error"] or isinstance(
        value["error"]["details"]["error_code"], str
    )
    assert value["error"]["type"] == TYPES[status], (status, value)
    assert (
        value["request_id"]
        == headers["x-request-id"]
        == headers.get("request-id", value["request_id"])
    )
    if status in (429, 503):
        assert headers["retry-after"].isdecimal()
    error: dict[str, str] = value["error"]
    return error


def check_models(value: dict[str, Any]) -> None:
    """A list of models."""
    assert value.keys() == set(SyncPage.model_fields), value
    for model in value["data"]:
        check_type(sdk.ModelInfo, model)


def check_type(kind: type[pydantic.BaseModel], value: object) -> None:
    """A value of a type of the SDK. The types allow other keys, so these are searched for."""
    assert list(extras(kind.model_validate(value), kind.__name__)) == []


def extras(value: object, where: str) -> Iterator[str]:
    if isinstance(value, pydantic.BaseModel):
        yield from (f"{where}.{name}" for name in value.model_extra or ())
        yield from (
            one
            for name in type(value).model_fields
            for one in extras(getattr(value, name), f"{where}.{name}")
        )
    elif isinstance(value, list):
        yield from (found for one in value for found in extras(one, where))


def check_stream(text: str, complete: bool = True) -> list[dict[str, Any]]:
    """A stream: each event, and their order. Returns the events, without pings."""
    blocks = [block for block in text.split("\n\n")[:-1] if not block.startswith(":")]
    found = []
    for block in blocks:
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        if value["type"] == "ping":
            assert value == {"type": "ping"}
            continue
        if value["type"] != "error":
            check_type(EVENTS[value["type"]], value)
        found.append(value)
    check_order(found, complete)
    return found


def check_order(events: list[dict[str, Any]], complete: bool) -> None:
    kinds = [event["type"] for event in events]
    if kinds[-1:] == ["error"]:
        kinds, complete = kinds[:-1], False
    assert kinds[:1] in ([], ["message_start"]) and "message_start" not in kinds[1:]
    if complete:
        assert kinds[-2:] == ["message_delta", "message_stop"]
    open_block: dict[str, Any] | None = None
    num_blocks = 0
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_block is None and event["index"] == num_blocks
                open_block, num_blocks = event["content_block"], num_blocks + 1
            case "content_block_delta":
                assert open_block is not None and event["index"] == num_blocks - 1
                allowed = {
                    "text": {"text_delta"},
                    "thinking": {"thinking_delta", "signature_delta"},
                    "tool_use": {"input_json_delta"},
                }
                assert event["delta"]["type"] in allowed[open_block["type"]]
            case "content_block_stop":
                assert open_block is not None and event["index"] == num_blocks - 1
                open_block = None
    assert not complete or open_block is None


def content_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream, joined as a client joins them. The input of a call is text."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"]})
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            field = {
                "text_delta": "text",
                "thinking_delta": "thinking",
                "signature_delta": "signature",
            }.get(delta["type"], "input")
            blocks[-1][field] += delta.get("partial_json", delta.get(field))
    return blocks
