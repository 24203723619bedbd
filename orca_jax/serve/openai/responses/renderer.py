"""The rendering of a response: its items while they are generated, the events of a stream, and the end."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.serve.openai.answer import KEEP_ALIVE
from orca_jax.serve.openai.errors import TOO_LONG, ApiError
from orca_jax.serve.openai.generation import Piece, whole_parts
from orca_jax.serve.openai.logprobs import chat_logprobs
from orca_jax.serve.openai.responses.items import (
    CallItem,
    FunctionName,
    IncompleteDetails,
    InputDetails,
    ItemStatus,
    MessageItem,
    ModelResponse,
    OutputItem,
    RawMessage,
    ReasoningItem,
    ResponseFault,
    ResponseUsage,
    ShownText,
)
from orca_jax.serve.openai.responses.store import new_id
from orca_jax.serve.openai.responses.telemetry import Telemetry
from orca_jax.serve.openai.schema.answers import CompletionDetails, TokenLogprob, Usage
from orca_jax.serve.openai.schema.input_items import ReasoningText
from orca_jax.text.tokenizer import Tokenizer
from orca_jax.text.tools import OutputPart, Reasoning, ToolCall

type ItemEvent = tuple[str, dict[str, Any]]
"""The type of an event, and its fields without its number and the place of the item."""


class OpenItem(ABC):
    """An item that is being generated, with its text in pieces."""

    def __init__(self, prefix: str) -> None:
        self.id = new_id(prefix)
        self._texts: list[str] = []

    def add_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        """Add a piece of text."""
        self._texts.append(text)

    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def begin(self) -> list[ItemEvent]:
        """The events before the first piece."""
        return [("response.output_item.added", {"item": self.whole("in_progress")})]

    @abstractmethod
    def deltas(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[ItemEvent]:
        """The events of a piece."""

    @abstractmethod
    def end(self, whole: OutputItem) -> list[ItemEvent]:
        """The events after the last piece."""

    @abstractmethod
    def whole(self, status: ItemStatus) -> OutputItem:
        """The item so far."""


class OpenMessage(OpenItem):
    """A message in the making."""

    def __init__(self) -> None:
        super().__init__("msg")
        self._logprobs: list[TokenLogprob] = []

    def add_text(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        """Add a piece of text."""
        super().add_text(text, logprobs)
        self._logprobs += logprobs

    def begin(self) -> list[ItemEvent]:
        """The beginnings of the item and of its only part."""
        return [
            ("response.output_item.added", {"item": MessageItem(self.id, [], "in_progress")}),
            ("response.content_part.added", {"content_index": 0, "part": ShownText("")}),
        ]

    def deltas(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[ItemEvent]:
        """The event of a piece."""
        fields = {"content_index": 0, "delta": text, "logprobs": _without_bytes(logprobs)}
        return [("response.output_text.delta", fields)]

    def end(self, whole: OutputItem) -> list[ItemEvent]:
        """The ends of the text, of its part and of the item."""
        part = ShownText(self.text(), self._logprobs)
        logprobs = _without_bytes(self._logprobs)
        return [
            (
                "response.output_text.done",
                {"content_index": 0, "text": part.text, "logprobs": logprobs},
            ),
            ("response.content_part.done", {"content_index": 0, "part": part}),
            ("response.output_item.done", {"item": whole}),
        ]

    def whole(self, status: ItemStatus) -> OutputItem:
        """The item so far."""
        return MessageItem(self.id, [ShownText(self.text(), self._logprobs)], status)


class OpenCallItem(OpenItem):
    """A call of a function in the making."""

    def __init__(self, call_id: str, name: FunctionName) -> None:
        super().__init__("fc")
        self._call_id = call_id
        self._name = name

    def deltas(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[ItemEvent]:
        """The event of a piece of the arguments."""
        return [("response.function_call_arguments.delta", {"delta": text})]

    def end(self, whole: OutputItem) -> list[ItemEvent]:
        """The ends of the arguments and of the item."""
        # required by versions 1 and 2 of OpenAI's client
        done = {"arguments": self.text(), "name": self._name.name}
        return [
            ("response.function_call_arguments.done", done),
            ("response.output_item.done", {"item": whole}),
        ]

    def whole(self, status: ItemStatus) -> OutputItem:
        """The item so far."""
        name = self._name
        namespace = UNSET if name.namespace is None else name.namespace
        return CallItem(self.id, self._call_id, name.name, self.text(), status, namespace)


class OpenReasoning(OpenItem):
    """Reasoning in the making.

    Args:
        summarizes: the text is sent as a summary too, since some clients read nothing else.
    """

    def __init__(self, *, summarizes: bool) -> None:
        super().__init__("rs")
        self._summarizes = summarizes

    def begin(self) -> list[ItemEvent]:
        """The beginning of the item, and that of its summary."""
        added: list[ItemEvent] = [
            ("response.output_item.added", {"item": ReasoningItem(self.id, [], "in_progress")})
        ]
        if self._summarizes:
            part = ReasoningText("summary_text", "")
            added.append(
                ("response.reasoning_summary_part.added", {"summary_index": 0, "part": part})
            )
        return added

    def deltas(self, text: str, logprobs: Sequence[TokenLogprob]) -> list[ItemEvent]:
        """The events of a piece."""
        events: list[ItemEvent] = [
            ("response.reasoning_text.delta", {"content_index": 0, "delta": text})
        ]
        if self._summarizes:
            events.append(
                ("response.reasoning_summary_text.delta", {"summary_index": 0, "delta": text})
            )
        return events

    def end(self, whole: OutputItem) -> list[ItemEvent]:
        """The ends of the text, of its summary and of the item."""
        text = self.text()
        events: list[ItemEvent] = [
            ("response.reasoning_text.done", {"content_index": 0, "text": text})
        ]
        for part in self._summary():
            done = {"summary_index": 0, "text": text}
            events.append(("response.reasoning_summary_text.done", done))
            events.append(
                ("response.reasoning_summary_part.done", {"summary_index": 0, "part": part})
            )
        return [*events, ("response.output_item.done", {"item": whole})]

    def whole(self, status: ItemStatus) -> OutputItem:
        """The item so far."""
        content = [ReasoningText("reasoning_text", self.text())]
        return ReasoningItem(self.id, content, status, self._summary())

    def _summary(self) -> list[ReasoningText]:
        if not self._summarizes:
            return []
        return [ReasoningText("summary_text", self.text())]


def _without_bytes(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Log probabilities as the events of a stream have them; the item has the bytes too."""
    plain: list[dict[str, Any]] = []
    for one in logprobs:
        tops = [{"token": top.token, "logprob": top.logprob} for top in one.top_logprobs]
        plain.append({"token": one.token, "logprob": one.logprob, "top_logprobs": tops})
    return plain


type Keep = Callable[[ModelResponse, bytes], None]
_encode = msgspec.json.Encoder().encode
_DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":'


class ResponseRenderer:
    """Renders one response. `chunk` makes the events of a stream; without a stream it only collects the items.

    Args:
        begun: the response without items.
        tokenizer: names tokens in log probabilities.
        num_top: the number of most probable tokens in the answer, None without log probabilities.
        names: the functions by the names that the model sees.
        new_call_id: makes the id of a call.
        prompt: the prompt, if the response shall have it and the answer as texts and ids.
        streams: True if the events are sent.
        summarizes: True if reasoning is sent as a summary too.
        telemetry: measures the call, None if its events have no times.
        keep: takes a response at its end, and its JSON.
    """

    def __init__(
        self,
        begun: ModelResponse,
        tokenizer: Tokenizer,
        *,
        num_top: int | None,
        names: Mapping[str, FunctionName],
        new_call_id: Callable[[], str],
        prompt: Sequence[int] | None,
        streams: bool,
        summarizes: bool,
        telemetry: Telemetry | None,
        keep: Keep,
    ) -> None:
        self._begun = begun
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._names = names
        self._new_call_id = new_call_id
        self._prompt = prompt
        self._ids: list[int] = []  # of the answer, if it shall have them
        self._streams = streams
        self._summarizes = summarizes
        self._telemetry = telemetry
        self._keep = keep
        self._sequence = 0  # number of the next event
        self._output: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is held back
        self._is_cut = False

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """The events of a piece: of its parts, and of the items that begin and end with them."""
        events = self._begin()
        if self._telemetry is not None and (progress := self._telemetry.progress()):
            events += self._event("response.in_progress", response=self._begun, **progress)
        if self._num_top is not None:
            if piece.num_reasoning:
                self._logprobs = []  # of the start tag
            rest = slice(piece.num_reasoning, None)
            self._logprobs += chat_logprobs(
                self._tokenizer, self._num_top, piece.ids[rest], piece.logprobs[rest]
            )
        if self._prompt is not None:
            self._ids += piece.ids
        parts = piece.in_order()
        if self._num_top is not None:
            # several parts may be of one text, whose log probabilities go with the first part
            parts = whole_parts(parts)
        for part in parts:
            events += self._part(part)
        if piece.reason is not None:
            self._is_cut = piece.reason == "length"
            # clients read the text of an answer, also of an empty one
            if self._open is None and not self._output:
                events += self._start(OpenMessage())
            events += self._close()
        return events

    def silence(self) -> bytes:
        """The first events, and later comments."""
        return self._begin() or KEEP_ALIVE

    def end(self, usage: Usage) -> bytes:
        """The event with the whole response."""
        answer = self.answer(usage)
        times: dict[str, Any] = {}
        if self._telemetry is not None:
            times = self._telemetry.timings()
        return self._event(f"response.{self._status}", response=msgspec.Raw(answer), **times)

    @property
    def _status(self) -> Literal["incomplete", "completed"]:
        """The status of the response and of its last item, after the last piece."""
        return "incomplete" if self._is_cut else "completed"

    def failure(self, error: ApiError) -> bytes:
        """The event of a failed response. The first event of the stream comes before it, unless it was sent already."""
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
        if error.code == TOO_LONG:
            code = TOO_LONG
        fault = ResponseFault(code, error.message)
        failed = msgspec.structs.replace(
            self._begun, status="failed", error=fault, output=self._output
        )
        events = b""
        if not self._sequence:
            events = self._event("response.created", response=self._begun)
        return events + self._event("response.failed", response=failed)

    def answer(self, usage: Usage) -> bytes:
        """The whole response, after its last piece."""
        end: dict[str, Any] = {"completed_at": int(time.time())}
        if self._is_cut:
            end = {"incomplete_details": IncompleteDetails("max_output_tokens")}
        if self._prompt is not None:
            end["input_messages"] = [self._raw(self._prompt)]
            end["output_messages"] = [self._raw(self._ids)]
        whole = msgspec.structs.replace(
            self._begun, status=self._status, output=self._output, usage=_usage(usage), **end
        )
        answer = _encode(whole)
        self._keep(whole, answer)
        return answer

    def _raw(self, ids: Sequence[int]) -> RawMessage:
        return RawMessage(self._tokenizer.decode(ids, skip_special_tokens=False), list(ids))

    def _begin(self) -> bytes:
        if self._sequence or not self._streams:
            return b""
        created = self._event("response.created", response=self._begun)
        return created + self._event("response.in_progress", response=self._begun)

    def _part(self, part: OutputPart) -> bytes:
        opened = self._open
        events = b""
        match part:
            case str(text):
                if not isinstance(opened, OpenMessage):
                    events = self._start(OpenMessage())
            case Reasoning(text):
                if not isinstance(opened, OpenReasoning):
                    events = self._start(OpenReasoning(summarizes=self._summarizes))
            case ToolCall(None, text):
                if not isinstance(opened, OpenCallItem):
                    return events  # a piece of a call that was left out
            case ToolCall(str(name), text):
                shown = self._names.get(name) or FunctionName(name)
                events = self._start(OpenCallItem(self._new_call_id(), shown))
        assert self._open is not None, "an item is open"
        return events + self._delta(self._open, text)

    def _delta(self, item: OpenItem, text: str) -> bytes:
        logprobs: Sequence[TokenLogprob] = ()
        # its tokens were left out; these are of what follows
        if not isinstance(item, OpenReasoning):
            logprobs = self._logprobs
            self._logprobs = []
        item.add_text(text, logprobs)
        if not self._streams:
            return b""
        if isinstance(item, OpenMessage) and not logprobs and self._telemetry is None:
            # Formatted by hand, since almost every token of a stream takes this path.
            self._sequence += 1
            return (
                b'%b%d,"item_id":"%b","output_index":%d,"content_index":0,"delta":%b,"logprobs":[]}\n\n'
                % (
                    _DELTA,
                    self._sequence - 1,
                    item.id.encode(),
                    len(self._output),
                    _encode(text),
                )
            )
        if not text and not logprobs:
            return b""
        events = item.deltas(text, logprobs)
        if self._telemetry is not None:
            _, fields = events[0]
            fields |= self._telemetry.timings()
        return self._item_events(events)

    def _start(self, item: OpenItem) -> bytes:
        events = self._close()
        self._open = item
        return events + self._item_events(item.begin())

    def _close(self) -> bytes:
        """End the open item. If the answer is cut, it is incomplete."""
        item = self._open
        if item is None:
            return b""
        events = b""
        if self._logprobs and isinstance(item, OpenMessage):  # such as those of the end token
            events = self._delta(item, "")
        whole = item.whole(self._status)
        events += self._item_events(item.end(whole))
        self._open = None
        self._output.append(whole)
        return events

    def _item_events(self, events: Sequence[tuple[str, dict[str, Any]]]) -> bytes:
        """Events about the open item."""
        assert self._open is not None, "an item is open"
        whole = b""
        for kind, fields in events:
            place: dict[str, Any] = {"output_index": len(self._output)}
            if "item" not in fields:
                place = {"item_id": self._open.id, **place}
            whole += self._event(kind, **place, **fields)
        return whole

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._streams:
            return b""
        number = self._sequence
        self._sequence = self._sequence + 1
        data = _encode({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def _usage(usage: Usage) -> ResponseUsage:
    """The counts of a chat in the form of responses."""
    details = usage.prompt_tokens_details
    generated = usage.completion_tokens_details
    counts = [0, 0]
    if not isinstance(details, UnsetType):
        counts = [details.cached_tokens, details.cache_write_tokens]
    return ResponseUsage(
        usage.prompt_tokens,
        InputDetails(*counts),
        usage.completion_tokens,
        CompletionDetails(0) if generated is UNSET else generated,
        usage.total_tokens,
        usage.cache_explanation,
    )
