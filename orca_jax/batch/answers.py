"""Rows of the output in OpenAI's shape, and what can be read off them."""

from dataclasses import dataclass
from typing import Any

import msgspec

from orca_jax.batch.rows import BadLine, Row

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine or a server said to a row. `body` is one value of JSON without line breaks."""

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
    """The line of an answer, be it a refusal."""
    response = _Response(answer.status, answer.request_id, msgspec.Raw(answer.body))
    return _encode(_OutputRow(row_id, row.custom_id, response, None)) + b"\n"


def error_row(row_id: str, bad: BadLine) -> bytes:
    """The line of one that was no request."""
    error = _Error(bad.code, bad.message, bad.param, bad.line)
    return _encode(_OutputRow(row_id, bad.custom_id, None, error)) + b"\n"


@dataclass(frozen=True, slots=True)
class RowSummary:
    """What counts of a row."""

    error: str | None = None  # its kind, where it is one
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ReadUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


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
    """A row of an output file."""

    id: str
    custom_id: str | None
    summary: RowSummary


def read_row(line: bytes) -> WrittenRow | None:
    """A line that this module wrote; None if it is something else."""
    try:
        row = _row.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if row.response is not None:
        return WrittenRow(row.id, row.custom_id, row_summary(row.response.status_code, bytes(row.response.body)))
    return None if row.error is None else WrittenRow(row.id, row.custom_id, RowSummary(row.error.code))


def row_summary(status: int, body: bytes) -> RowSummary:
    """Tokens of an answer, or the kind of its error, by whichever server it was made."""
    try:
        read = _body.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        read = _ReadBody()
    if status != 200:
        return RowSummary(_error_kind(status, read.error))
    usage = read.usage or _ReadUsage()
    return RowSummary(None, usage.prompt_tokens or 0, usage.completion_tokens or 0)


def _error_kind(status: int, error: object) -> str:
    if isinstance(error, dict):
        for name in ("code", "type"):
            if isinstance(error.get(name), str):
                return f"{status} {error[name][:100]}"
    return str(status)
