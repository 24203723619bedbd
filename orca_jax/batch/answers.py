"""Rows of the output file in OpenAI's format: encoding, and decoding for a resumed run."""

from dataclasses import dataclass
from typing import Any

import msgspec

from orca_jax.batch.rows import BadLine, Row
from orca_jax.values.errors import UNREADABLE

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of an engine or a server to a row. `body` is one JSON value without line breaks."""

    status: int
    request_id: str
    body: bytes


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str
    param: str | None
    line: int


class _OutputRow(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


def answer_row(row_id: str, row: Row, answer: Answer) -> bytes:
    """The output line for an answer, possibly an error answer."""
    response = _Response(answer.status, answer.request_id, msgspec.Raw(answer.body))
    return _encode(_OutputRow(row_id, row.custom_id, response, None)) + b"\n"


def error_row(row_id: str, bad: BadLine) -> bytes:
    """The output line for an input line without a valid request."""
    error = _Error(bad.code, bad.message, bad.param, bad.line)
    return _encode(_OutputRow(row_id, bad.custom_id, None, error)) + b"\n"


@dataclass(frozen=True, slots=True)
class RowSummary:
    """The part of a row that the final summary counts."""

    error: str | None = None  # kind of the error; None: answered
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ReadUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None  # of decisions
    output_tokens: int | None = None


class _ReadBody(msgspec.Struct):
    usage: _ReadUsage | None = None
    error: Any = None


class _ReadResponse(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _ReadError(msgspec.Struct):
    code: str


class _ReadRow(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _ReadResponse | None
    error: _ReadError | None


_row = msgspec.json.Decoder(_ReadRow)
_body = msgspec.json.Decoder(_ReadBody)


@dataclass(frozen=True, slots=True)
class WrittenRow:
    """A row read from an output file."""

    id: str
    custom_id: str | None
    summary: RowSummary


def read_row(line: bytes) -> WrittenRow | None:
    """Decode a line written by this module; None for any other line."""
    try:
        row = _row.decode(line)
    except UNREADABLE:
        return None
    if row.response is not None:
        return WrittenRow(
            row.id, row.custom_id, row_summary(row.response.status_code, bytes(row.response.body))
        )
    return (
        None if row.error is None else WrittenRow(row.id, row.custom_id, RowSummary(row.error.code))
    )


def row_summary(status: int, body: bytes) -> RowSummary:
    """Token counts of an answer, or the kind of its error. Accepts the answers of other servers too."""
    try:
        read = _body.decode(body)
    except UNREADABLE:
        read = _ReadBody()
    if status != 200:
        return RowSummary(_error_kind(status, read.error))
    usage = read.usage or _ReadUsage()
    prompt_tokens = usage.prompt_tokens or usage.input_tokens or 0
    return RowSummary(None, prompt_tokens, usage.completion_tokens or usage.output_tokens or 0)


def _error_kind(status: int, error: object) -> str:
    if isinstance(error, dict):
        for name in ("code", "type"):
            if isinstance(error.get(name), str):
                return f"{status} {error[name][:100]}"
    return str(status)
