"""Answers in Anthropic's format, whole and as a stream."""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from orca_jax.serve.openai.chat import call_id
from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.generation import Job, Piece, whole_parts
from orca_jax.serve.openai.messages.errors import encode_error
from orca_jax.serve.openai.schema.answers import AnswerReason, CacheExplanation, Usage
from orca_jax.text.tools import OutputPart, Reasoning, ToolCall

SIGNATURE = "unsigned"
"""Of thinking in answers: clients require one, and it is not checked when it comes back."""
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]
_EMPTY = msgspec.Raw(b"{}")
_encode = msgspec.json.Encoder().encode


class MessageOutput(msgspec.Struct, frozen=True):
    """The kinds of generated tokens."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """Token counts. The prompt has `input_tokens` and those read from the cache and written into it."""

    input_tokens: int  # computed for this call, and not kept
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0
    output_tokens_details: MessageOutput | UnsetType = UNSET  # UNSET if reasoning is not read apart
    cache_explanation: CacheExplanation | UnsetType = UNSET


class AnswerText(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str


class AnswerToolUse(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A tool call of an answer."""

    id: str
    name: str
    input: Annotated[msgspec.Raw, Meta(extra_json_schema={"type": "object"})]


class AnswerThinking(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning before an answer."""

    thinking: str
    signature: str = SIGNATURE


AnswerBlock = AnswerText | AnswerToolUse | AnswerThinking


class MessageAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A whole answer, or its beginning in a stream."""

    id: str
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"


class MessagesRenderer:
    """Renders the answer to one call.

    Args:
        job: the prepared call.
        usage: returns the token counts so far.
        request_id: part of errors.
        fills_context: True if the answer ends at its limit where the context does.
    """

    def __init__(
        self, job: Job, usage: Callable[[], Usage], request_id: str, *, fills_context: bool
    ) -> None:
        self._job = job
        self._usage = usage
        self._request_id = request_id
        self._fills_context = fills_context
        self._has_begun = False
        self._num_blocks = 0  # whole ones: the index of the open one
        self._open: type[OutputPart] | None = None  # kind of the open block
        self._end: Piece | None = None

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """The events of a piece, or none. The last ones follow at the end, since they have the token counts."""
        events = b""
        if not self._has_begun:
            events = self._begin()
        for part in piece.in_order():
            events += self._delta(part)
        if piece.reason is not None:
            self._end = piece
        return events

    def silence(self) -> bytes:
        """An event without content."""
        return PING

    def end(self, usage: Usage) -> bytes:
        """The events with the reason of the end and the token counts."""
        assert self._end is not None, "a stream ends when its choice has ended"
        delta = {"stop_reason": self._stop_reason(self._end), "stop_sequence": self._end.stop}
        counts = message_usage(usage)
        return b"".join(
            [
                self._close(),
                event("message_delta", delta=delta, usage=counts),
                event("message_stop"),
            ]
        )

    def failure(self, error: ApiError) -> bytes:
        """The event of the error."""
        return b"event: error\ndata: " + encode_error(error, self._request_id) + b"\n\n"

    def answer(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole answer."""
        (whole,) = choices
        blocks = [self._block(part) for part in whole_parts(whole.in_order())]
        return _encode(
            self._message(blocks, message_usage(usage), self._stop_reason(whole), whole.stop)
        )

    def _block(self, part: OutputPart) -> AnswerBlock:
        match part:
            case str():
                return AnswerText(part)
            case Reasoning(text):
                return AnswerThinking(text)
            case ToolCall(name, arguments):
                return AnswerToolUse(self._call_id(), name or "", input_of(arguments))

    def _call_id(self) -> str:
        return call_id(self._job).replace("call_", "toolu_")

    def _message(
        self,
        content: list[AnswerBlock],
        usage: MessageUsage,
        reason: StopReason | None = None,
        stop: str | None = None,
    ) -> MessageAnswer:
        return MessageAnswer(self._job.id, self._job.model, content, reason, stop, usage)

    def _stop_reason(self, whole: Piece) -> StopReason:
        reasons: dict[AnswerReason, StopReason] = {"tool_calls": "tool_use", "stop": "end_turn"}
        if whole.reason == "length":
            return "model_context_window_exceeded" if self._fills_context else "max_tokens"
        assert whole.reason is not None, "a call is answered when it has ended"
        return "stop_sequence" if whole.stop is not None else reasons[whole.reason]

    def _begin(self) -> bytes:
        self._has_begun = True
        usage = msgspec.structs.replace(message_usage(self._usage()), output_tokens=0)
        return event("message_start", message=self._message([], usage))

    def _delta(self, part: OutputPart) -> bytes:
        """The events of a part: a block that begins with it, and its text."""
        kind = type(part)
        is_new = kind is not self._open or (isinstance(part, ToolCall) and part.name is not None)
        events = b""
        if is_new:
            events = self._close() + self._start(part)
        self._open = kind
        match part:
            case str():
                # Formatted by hand, since almost every token of a stream takes this path.
                return events + (
                    b"event: content_block_delta\ndata: "
                    b'{"type":"content_block_delta","index":%d,"delta":{"type":"text_delta","text":%b}}\n\n'
                    % (self._num_blocks, _encode(part))
                )
            case Reasoning(text):
                return events + self._piece(type="thinking_delta", thinking=text)
            case ToolCall(_, arguments):
                return events + self._piece(type="input_json_delta", partial_json=arguments)

    def _start(self, part: OutputPart) -> bytes:
        match part:
            case str():
                block: AnswerBlock = AnswerText("")
            case Reasoning():
                block = AnswerThinking("", "")
            case ToolCall(name):
                block = AnswerToolUse(self._call_id(), name or "", _EMPTY)
        return event("content_block_start", index=self._num_blocks, content_block=block)

    def _piece(self, **delta: str) -> bytes:
        return event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> bytes:
        """The last events of the open block."""
        if self._open is None:
            return b""
        events = b""
        if self._open is Reasoning:
            events = self._piece(type="signature_delta", signature=SIGNATURE)
        events += event("content_block_stop", index=self._num_blocks)
        self._open = None
        self._num_blocks += 1
        return events


def event(kind: str, **fields: object) -> bytes:
    """An event of a stream."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields}))


def message_usage(usage: Usage) -> MessageUsage:
    """The token counts in Anthropic's format."""
    of_prompt = usage.prompt_tokens_details
    of_answer = usage.completion_tokens_details
    cached = 0
    written = 0
    if not isinstance(of_prompt, UnsetType):
        cached = of_prompt.cached_tokens
        written = of_prompt.cache_write_tokens
    thought = (
        UNSET if isinstance(of_answer, UnsetType) else MessageOutput(of_answer.reasoning_tokens)
    )
    return MessageUsage(
        usage.prompt_tokens - cached - written,
        usage.completion_tokens,
        cached,
        written,
        thought,
        cache_explanation=usage.cache_explanation,
    )


def input_of(arguments: str) -> msgspec.Raw:
    """The input of a call, an object; empty if a limit has cut its JSON."""
    try:
        value = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return _EMPTY
    return msgspec.Raw(arguments.encode()) if isinstance(value, dict) else _EMPTY
