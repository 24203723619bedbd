"""Reads the received bytes of streamed answers: HTTP by h11, server-sent events, and OpenAI's chunks."""

import itertools
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import h11

from orca_jax.tools.bench.online.exchange import Exchange

_BETWEEN = re.compile(rb"\r\n\r\n|\n\n|\r\r")  # between two events
# of the delta of a chat
_TEXTS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
_SHOWN = 300  # characters of an error


@dataclass
class CallOutcome:
    """The outcome of one call. Times are in seconds, monotonic; `failure` is the kind of an error, or empty.

    An event may hold several tokens, so `num_output` is the server's own count if it sends one.
    """

    due: float
    sent: float
    connected: float | None
    end: float  # the last event with a choice
    token_times: list[float] = field(default_factory=list)  # of each event with text
    num_input: int | None = None
    num_output: int | None = None
    failure: str = ""
    detail: str = ""

    @property
    def output_tokens(self) -> int:
        """The server's count, or else the number of events with text."""
        if self.num_output is None:
            return len(self.token_times)
        return self.num_output


def read_outcome(call: Exchange) -> CallOutcome:
    """Parse the answer of one call. Every fault becomes the `failure` of the outcome."""
    outcome = CallOutcome(call.due, call.sent, call.connected, call.ended)
    status, body, fault = read_body(call)
    if call.failure and (call.failure == "timeout" or status is None):
        outcome.failure = call.failure
        outcome.detail = call.detail
    elif status is None:
        outcome.failure = "stream_cut"
        outcome.detail = fault or "the server closed the connection without an answer"
    elif status != 200:
        text = b"".join(data for _, data in body).decode(errors="replace")
        outcome.failure, outcome.detail = f"http_{status}", " ".join(text.split())[:_SHOWN]
    else:
        _read_stream(outcome, body)
    return outcome


def _read_stream(outcome: CallOutcome, body: Sequence[tuple[float, bytes]]) -> None:
    is_ended = False
    for moment, data in events(body):
        if data == b"[DONE]":
            is_ended = True
            continue
        try:
            value = json.loads(data)
            if value.get("error") or value.get("object") == "error":
                outcome.failure, outcome.detail = (
                    "stream_error",
                    json.dumps(value.get("error", value))[:_SHOWN],
                )
                return
            is_ended |= _read_chunk(outcome, value, moment)
        except (ValueError, AttributeError, KeyError, TypeError, IndexError):
            outcome.failure = "bad_stream"
            outcome.detail = f"not a chunk of OpenAI's: {data[:_SHOWN]!r}"
            return
    if not is_ended:
        outcome.failure, outcome.detail = (
            "stream_cut",
            "the stream ended without [DONE] or a finish reason",
        )
        if body and not outcome.token_times:
            outcome.failure = "bad_stream"
            outcome.detail = f"no events in the answer: {body[0][1][:_SHOWN]!r}"
    elif not outcome.token_times:
        outcome.failure, outcome.detail = "no_tokens", "the stream has no event with text"


def _read_chunk(outcome: CallOutcome, value: Mapping[str, Any], moment: float) -> bool:
    """Add one chunk to the outcome. Return true if it has the finish reason."""
    if usage := value.get("usage"):
        outcome.num_input = usage.get("prompt_tokens", outcome.num_input)
        outcome.num_output = usage.get("completion_tokens", outcome.num_output)
    if not value.get("choices"):
        return False
    choice = value["choices"][0]
    is_last = bool(choice.get("finish_reason"))
    if "delta" in choice:
        # the first chunk of a chat has only the role
        has_text = any(choice["delta"].get(name) for name in _TEXTS)
    else:
        # a token may be the first bytes of a character
        has_text = bool(choice["text"]) or not is_last
    if has_text:
        outcome.token_times.append(moment)
    outcome.end = moment
    return is_last


def events(body: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield the data of every server-sent event, with the time of its last byte. Comments are left out."""
    raw = b"".join(data for _, data in body)
    ends = list(itertools.accumulate(len(data) for _, data in body))
    at = 0
    while at < len(raw):
        between = _BETWEEN.search(raw, at)
        begin = at
        at = len(raw) if between is None else between.end()
        lines = [line for line in raw[begin:at].splitlines() if line.startswith(b"data:")]
        if lines:
            yield (
                body[bisect_left(ends, at)][0],
                b"\n".join(line[5:].removeprefix(b" ") for line in lines),
            )


def _events(
    connection: h11.Connection, arrivals: Sequence[tuple[float, bytes]]
) -> Iterator[tuple[float, Any]]:
    """The events of an answer with their times. Raises h11.RemoteProtocolError if it is not valid HTTP."""
    for moment, data in arrivals:
        connection.receive_data(data)
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
                return
            yield moment, event


def read_body(call: Exchange) -> tuple[int | None, list[tuple[float, bytes]], str]:
    """Return the status, the parts of the body with their times, and a fault of HTTP if there is one."""
    arrivals = [(moment, data) for moment, data in call.arrivals if data]
    connection = h11.Connection(h11.CLIENT)
    connection.send(
        h11.Request(method="POST", target="/", headers=[("host", "h"), ("connection", "close")])
    )
    connection.send(h11.EndOfMessage())
    status: int | None = None
    parts: list[tuple[float, bytes]] = []
    last = arrivals[-1][0] if arrivals else 0.0
    try:
        for moment, event in _events(connection, (*arrivals, (last, b""))):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                parts.append((moment, bytes(event.data)))
    except h11.RemoteProtocolError as error:
        return status, parts, f"not valid HTTP: {error}" if arrivals else ""
    return status, parts, ""
