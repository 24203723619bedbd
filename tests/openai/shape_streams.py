"""Rules of streams in OpenAI's shape: framing, one id, who comes first and last, and where `usage` stands."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from tests.openai.shape_rules import (
    check_chat_choice,
    check_completion_logprobs,
    check_usage,
    num_choices,
)
from tests.openai.shape_structs import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    ErrorEnvelope,
    Function,
    Message,
    ToolCall,
    Usage,
    decode,
    require,
)

Chunk = Completion | ChatChunk


@dataclasses.dataclass
class Assembled:
    """A chat choice put together from its deltas."""

    text: str = ""
    # index -> id, name, arguments
    calls: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    logprobs: list[Any] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None

    def message(self) -> Message:
        calls = [
            ToolCall(call, "function", Function(name, text))
            for call, name, text in self.calls.values()
        ]
        return Message("assistant", self.text, None, calls or UNSET)


def events(body: bytes, complete: bool) -> Iterator[bytes]:
    """The data of every event but `[DONE]`, which must be the last. Raises ShapeError."""
    text, end, rest = body.rpartition(b"\n\n")
    require(not rest or not complete, f"the stream ends in the middle of an event: {rest[:100]!r}")
    parts = (text + end).split(b"\n\n")[:-1] if end else []
    done = failed = False
    for part in parts:
        lines = [line for line in part.split(b"\n") if not line.startswith(b":")]
        if not lines:
            continue  # a comment keeps the connection alive
        require(
            len(lines) == 1 and lines[0].startswith(b"data: "),
            f"not one line of data: {part[:100]!r}",
        )
        require(not done, f"an event after [DONE]: {part[:100]!r}")
        data = lines[0].removeprefix(b"data: ")
        if data == b"[DONE]":
            done = True
            continue
        require(not failed, f"an event after an error: {data[:100]!r}")
        failed = is_error(data)
        yield data
    require(done or failed or not complete, "the stream ended without [DONE] or an error")


def read_chunks[T: Completion | ChatChunk](
    kind: type[T], body: bytes, complete: bool
) -> tuple[list[T], bool]:
    """The chunks, and whether the stream came to its own end, so not to an error. Raises ShapeError."""
    chunks: list[T] = []
    ended = complete
    for data in events(body, complete):
        if is_error(data):
            decode(ErrorEnvelope, data, "an error in a stream")
            ended = False
        else:
            chunks.append(decode(kind, data, f"chunk {len(chunks)}"))
    require(chunks or not ended, "a stream without a chunk")
    return chunks, ended


def is_error(data: bytes) -> bool:
    """Whether an event is an error, in whatever shape."""
    return re.match(rb'\s*\{\s*"error"', data) is not None


def check_frame(request: Mapping[str, Any], chunks: Sequence[Chunk], ended: bool) -> None:
    """What chunks have in common, and their usage. Raises ShapeError."""
    for name in ("id", "created", "model"):
        values = {getattr(chunk, name) for chunk in chunks}
        require(len(values) <= 1, f"{name} changes within a stream: {sorted(map(str, values))}")
    options = request.get("stream_options", {})
    if not options.get("include_usage"):
        for i, chunk in enumerate(chunks):
            require(chunk.usage is UNSET, f"chunk {i}: usage that nobody asked for")
            require(chunk.choices, f"chunk {i}: no choices")
        return
    pieces = chunks[:-1] if ended else chunks
    for i, chunk in enumerate(pieces):
        require(
            chunk.usage is not UNSET,
            f"chunk {i}: include_usage puts the key usage into every chunk",
        )
        if not options.get("continuous_usage_stats"):
            require(chunk.choices or not ended, f"chunk {i}: no choices, and it is not the last")
            require(
                chunk.usage is None or not chunk.choices, f"chunk {i}: usage before the last chunk"
            )
    if ended:
        last = chunks[-1]
        require(not last.choices, "the last chunk, that with usage, has choices")
        require(isinstance(last.usage, Usage), "the last chunk has no usage")
        assert isinstance(last.usage, Usage)
        check_usage(request, last.usage)


def by_index[T: CompletionChoice | ChatChunkChoice](
    request: Mapping[str, Any], choices: Sequence[T], ended: bool
) -> dict[int, list[T]]:
    """Pieces of each choice; every choice that was asked for ends once. Raises ShapeError."""
    expected = num_choices(request)
    pieces: dict[int, list[T]] = {}
    for choice in choices:
        require(choice.index < expected, f"choice {choice.index} of {expected}")
        before = pieces.setdefault(choice.index, [])
        require(
            not before or before[-1].finish_reason is None,
            f"choice {choice.index} goes on after its end",
        )
        before.append(choice)
    if ended:
        require(len(pieces) == expected, f"{expected} choices were asked for, got {sorted(pieces)}")
        for index, parts in pieces.items():
            require(parts[-1].finish_reason is not None, f"choice {index} has no finish_reason")
    return pieces


def check_completion_stream(request: Mapping[str, Any], body: bytes, complete: bool) -> None:
    """A stream of text completions. Raises ShapeError."""
    chunks, ended = read_chunks(Completion, body, complete)
    check_frame(request, chunks, ended)
    pieces = by_index(request, [choice for chunk in chunks for choice in chunk.choices], ended)
    for index, parts in pieces.items():
        offsets: list[int] = []
        for i, part in enumerate(parts):
            if part.logprobs is not None or part.text:
                check_completion_logprobs(request, part.logprobs, f"piece {i} of choice {index}")
            if part.logprobs is not None:
                offsets += part.logprobs.text_offset
        require(offsets == sorted(offsets), f"choice {index}: text_offset goes back")


def check_chat_stream(request: Mapping[str, Any], body: bytes, complete: bool) -> None:
    """A stream of chat completions. Raises ShapeError."""
    chunks, ended = read_chunks(ChatChunk, body, complete)
    check_frame(request, chunks, ended)
    pieces = by_index(request, [choice for chunk in chunks for choice in chunk.choices], ended)
    for index, parts in pieces.items():
        whole = assemble(index, parts)
        if ended:
            assert whole.finish_reason is not None
            logprobs = ChatLogprobs(whole.logprobs, None) if request.get("logprobs") else None
            choice = ChatChoice(
                index=index,
                message=whole.message(),
                logprobs=logprobs,
                finish_reason=whole.finish_reason,  # type: ignore[arg-type]
            )
            check_chat_choice(request, choice)
        if not request.get("logprobs"):
            require(not whole.logprobs, f"choice {index}: logprobs that nobody asked for")


def assemble(index: int, parts: Sequence[ChatChunkChoice]) -> Assembled:
    """Put a message together as clients do. Raises ShapeError."""
    whole = Assembled()
    first = parts[0].delta
    require(first.role == "assistant", f"choice {index}: the first delta has no role")
    require(
        not first.content and not first.tool_calls, f"choice {index}: the first delta is not empty"
    )
    for i, part in enumerate(parts):
        require(i == 0 or part.delta.role is UNSET, f"choice {index}: delta {i} repeats the role")
        whole.text += part.delta.content or ""
        whole.finish_reason = part.finish_reason
        if part.logprobs:
            whole.logprobs += part.logprobs.content or ()
        for call in part.delta.tool_calls or ():
            add_call(whole.calls, call, f"choice {index}, call {call.index}")
    return whole


def add_call(calls: dict[int, list[str]], call: Any, where: str) -> None:
    """A fragment of a call: its first one names it, further ones only add arguments. Raises ShapeError."""
    function = call.function or None
    name: Any = function.name if function is not None else UNSET
    if call.index not in calls:
        require(call.index == len(calls), f"{where}: calls do not come in order")
        require(call.id and call.type, f"{where}: its first delta has no id or type")
        require(name, f"{where}: its first delta has no name")
        calls[call.index] = [call.id, name, ""]
    else:
        require(call.id in (UNSET, calls[call.index][0]), f"{where}: its id changes")
        require(not name, f"{where}: its name comes twice")
    if function is not None:
        calls[call.index][2] += function.arguments or ""
