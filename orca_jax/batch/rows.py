"""Parsing of input lines into rows. A row has an id, an endpoint and a body.

Three kinds of lines are accepted: OpenAI's batch row, `{"custom_id", "method", "url", "body"}`; an object with `prompt`
and other fields of a completion; and, in a text file, the prompt itself. The contents of a body are not checked here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema.parse import refuse_duplicates
from orca_jax.values.errors import UNREADABLE

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
DECISIONS = "/v1/decisions"
URLS = (COMPLETIONS, CHATS, DECISIONS)
MAX_CUSTOM_ID = 512  # characters
MAX_LINE_BYTES = 32 * 2**20  # the server's default limit of a body

LineFormat = Literal["jsonl", "text"]

_FIELDS = ("custom_id", "method", "url", "body")
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder(Any).decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Row:
    """A request. `line` is the line number, from 1; `body` is JSON."""

    line: int
    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line without a valid request. `custom_id` is None if the line has no usable one."""

    line: int
    custom_id: str | None
    code: str
    message: str
    param: str | None = None


class _Wrong(Exception):
    """An error in a line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        self.code = code
        self.message = message
        self.param = param


class RowReader:
    """Parses the lines of one file.

    Args:
        kind: format of the lines.
        model: model name for prompts without one.
        defaults: completion fields for prompts. The fields of a line override them.
    """

    def __init__(self, kind: LineFormat, model: str, defaults: Mapping[str, Any]) -> None:
        self._kind = kind
        self._defaults = {"model": model, **defaults}
        self._raw_defaults = {
            name: msgspec.Raw(_encode(value)) for name, value in self._defaults.items()
        }

    def read(self, line: int, text: bytes | None) -> Row | BadLine:
        """The row in line number `line`. A `text` of None stands for a line longer than `MAX_LINE_BYTES`."""
        custom_id: str | None = None
        try:
            if text is None:
                raise _Wrong(
                    "line_too_long",
                    f"the line has more than {MAX_LINE_BYTES} bytes; split it into parts",
                )
            if not text.strip():
                raise _Wrong(
                    "empty_line", "the line is empty; remove it, since every line must be a request"
                )
            if self._kind == "text":
                return Row(
                    line,
                    default_id(line),
                    COMPLETIONS,
                    _encode({**self._defaults, "prompt": _decoded(text)}),
                )
            fields = _fields(text)
            custom_id = _custom_id(fields, line)
            return self._row(line, custom_id, fields)
        except _Wrong as wrong:
            return BadLine(line, custom_id, wrong.code, wrong.message, wrong.param)

    def _row(self, line: int, custom_id: str, fields: dict[str, msgspec.Raw]) -> Row:
        is_prompt = "prompt" in fields and not fields.keys() & {"method", "url", "body"}
        if is_prompt:
            body = {name: value for name, value in fields.items() if name != "custom_id"}
            return Row(line, custom_id, COMPLETIONS, _encode({**self._raw_defaults, **body}))
        _check_fields(fields)
        if _value(fields["method"]) != "POST":
            raise _Wrong("invalid_method", 'method must be "POST"', "method")
        url = _value(fields["url"])
        if url not in URLS:
            raise _Wrong(
                "invalid_url", f"url must be {' or '.join(URLS)}, got {_quoted(url)}", "url"
            )
        body_text = bytes(fields["body"])
        if not body_text.startswith(b"{"):
            raise _Wrong("invalid_body", "body must be a JSON object", "body")
        return Row(line, custom_id, url, body_text)


def default_id(line: int) -> str:
    """The `custom_id` of a prompt without one."""
    return f"line-{line}"


def repeated(row: Row, first: int) -> BadLine:
    """The error for a row with the same id as line `first`."""
    message = (
        f"custom_id {_quoted(row.custom_id)} is already used by line {first}; ids must be unique"
    )
    return BadLine(row.line, row.custom_id, "duplicate_custom_id", message, "custom_id")


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise _Wrong(
            "invalid_utf8", f"the line is not valid UTF-8: error at byte {error.start + 1}"
        ) from None


def _fields(text: bytes) -> dict[str, msgspec.Raw]:
    _decoded(text)  # raw values are not checked otherwise
    try:
        fields = _decode_fields(text)
        refuse_duplicates(text, fields)
    except msgspec.ValidationError:
        raise _Wrong("not_an_object", "the line must be a JSON object") from None
    except ApiError as error:
        raise _Wrong("duplicate_field", error.message, error.param) from None
    except UNREADABLE as error:
        raise _Wrong("invalid_json", f"the line is not valid JSON: {error}") from None
    return fields


def _custom_id(fields: dict[str, msgspec.Raw], line: int) -> str:
    if "custom_id" not in fields:
        if "prompt" in fields:
            return default_id(line)
        if "body" not in fields:
            message = "the line must have either body (for a batch row) or prompt"
            raise _Wrong("missing_required_parameter", message, "body")
        raise _Wrong("missing_required_parameter", "custom_id is required", "custom_id")
    custom_id = _value(fields["custom_id"])
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        message = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters"
        raise _Wrong("invalid_custom_id", message, "custom_id")
    return custom_id


def _check_fields(fields: Mapping[str, object]) -> None:
    for name in _FIELDS:
        if name not in fields:
            raise _Wrong("missing_required_parameter", f"{name} is required", name)
    for name in fields:
        if name not in _FIELDS:
            message = (
                f"unknown field {_quoted(name)}; the fields of a batch row are {', '.join(_FIELDS)}"
            )
            raise _Wrong("unknown_parameter", message, name[:100])


def _value(raw: msgspec.Raw) -> Any:
    """The decoded value, or None if it cannot be decoded."""
    try:
        return _decode(raw)
    except UNREADABLE:
        return None


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
