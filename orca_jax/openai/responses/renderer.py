"""The rendering of a response: its items while they are generated, the events of a stream, and the end."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from orca_jax.openai.answer import KEEP_ALIVE
from orca_jax.openai.errors import TOO_LONG, ApiError
from orca_jax.openai.generation import Piece, whole_parts
from orca_jax.openai.logprobs import chat_logprobs
from orca_jax.openai.responses.conversion import FunctionName
from orca_jax.openai.responses.items import (
    CallItem,
    IncompleteDetails,
    ItemStatus,
    MessageItem,
    ModelResponse,
    OutputItem,
    RawMessage,
    ReasoningItem,
    ResponseFault,
    ShownText,
    new_id,
    response_usage,
)
from orca_jax.openai.responses.telemetry import Telemetry
from orca_jax.openai.schema.answers import TokenLogprob, Usage
from orca_jax.openai.schema.responses import ReasoningText
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
    def delta(self, text: str, logprobs: Sequence[TokenLogprob]) -> ItemEvent:
        """The event of a piece."""

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

    def delta(self, text: str, logprobs: Sequence[TokenLogprob]) -> ItemEvent:
        """The event of a piece."""
        fields = {"content_index": 0, "delta": text, "logprobs": _without_bytes(logprobs)}
        return "response.output_text.delta", fields

    def end(self, whole: OutputItem) -> list[ItemEvent]:
        """The ends of the text, of its part and of the item."""
        part = ShownText(self.text(), self._logprobs)
        logprobs = _without_bytes(self._logprobs)
        return [
            ("response.output_text.done", {"content_index": 0, "text": part.text, "logprobs": logprobs}),
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

    def delta(self, text: str, logprobs: Sequence[TokenLogprob]) -> ItemEvent:
        """The event of a piece of the arguments."""
        return "response.function_call_arguments.delta", {"delta": text}

    def end(self, whole: OutputItem) -> list[ItemEvent]:
        """The ends of the arguments and of the item."""
        done = {"arguments": self.text(), "name": self._name.name}  # required by versions 1 and 2 of OpenAI's client
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
    """Reasoning in the making."""

    def __init__(self) -> None:
        super().__init__("rs")

    def begin(self) -> list[ItemEvent]:
        """The beginning of the item."""
        return [("response.output_item.added", {"item": ReasoningItem(self.id, [], "in_progress")})]

    def delta(self, text: str, logprobs: Sequence[TokenLogprob]) -> ItemEvent:
        """The event of a piece."""
        return "response.reasoning_text.delta", {"content_index": 0, "delta": text}

    def end(self, whole: OutputItem) -> list[ItemEvent]:
        """The ends of the text and of the item."""
        return [
            ("response.reasoning_text.done", {"content_index": 0, "text": self.text()}),
            ("response.output_item.done", {"item": whole}),
        ]

    def whole(self, status: ItemStatus) -> OutputItem:
        """The item so far."""
        return ReasoningItem(self.id, [ReasoningText("reasoning_text", self.text())], status)


def _without_bytes(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Log probabilities as the events of a stream have them; the item has the bytes too."""
    return [
        {
            "token": one.token,
            "logprob": one.logprob,
            "top_logprobs": [{"token": top.token, "logprob": top.logprob} for top in one.top_logprobs],
        }
        for one in logprobs
    ]


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
        self._telemetry = telemetry
        self._keep = keep
        self._sequence = 0  # number of the next event
        self._output: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is held back
        self._is_cut = False

    def chunk(self, piece: Piece, usage: Usage | None) -> bytes:
        """The events of a piece: those of its parts, and of the items that begin and end with them."""
        events = self._begin()
        if self._telemetry is not None and (progress := self._telemetry.progress()):
            events += self._event("response.in_progress", response=self._begun, **progress)
        if self._num_top is not None:
            if piece.num_reasoning:
                self._logprobs = []  # of the start tag
            rest = slice(piece.num_reasoning, None)
            self._logprobs += chat_logprobs(self._tokenizer, self._num_top, piece.ids[rest], piece.logprobs[rest])
        if self._prompt is not None:
            self._ids += piece.ids
        # A piece may have several parts of one text; its log probabilities go with the first part.
        for part in piece.in_order() if self._num_top is None else whole_parts(piece.in_order()):
            events += self._part(part)
        if piece.reason is not None:
            self._is_cut = piece.reason == "length"
            if self._open is None and not self._output:  # clients read the text of an answer, also of an empty one
                events += self._start(OpenMessage())
            events += self._close()
        return events

    def silence(self) -> bytes:
        """The first events, and later comments."""
        return self._begin() or KEEP_ALIVE

    def end(self, usage: Usage) -> bytes:
        """The event with the whole response."""
        answer = self.answer(usage)
        status = b"incomplete" if self._is_cut else b"completed"
        times = {} if self._telemetry is None else self._telemetry.timings()
        return self._event(f"response.{status.decode()}", response=msgspec.Raw(answer), **times)

    def failure(self, error: ApiError) -> bytes:
        """The event of a failed response. The first event of the stream comes before it, unless it was sent already."""
        code = {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status, "server_error")
        fault = ResponseFault(TOO_LONG if error.code == TOO_LONG else code, error.message)
        failed = msgspec.structs.replace(self._begun, status="failed", error=fault, output=self._output)
        created = b"" if self._sequence else self._event("response.created", response=self._begun)
        return created + self._event("response.failed", response=failed)

    def answer(self, usage: Usage) -> bytes:
        """The whole response, after its last piece."""
        whole = msgspec.structs.replace(
            self._begun,
            status="incomplete" if self._is_cut else "completed",
            incomplete_details=IncompleteDetails("max_output_tokens") if self._is_cut else None,
            output=self._output,
            usage=response_usage(usage),
            input_messages=UNSET if self._prompt is None else [self._raw(self._prompt)],
            output_messages=UNSET if self._prompt is None else [self._raw(self._ids)],
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
        opened, text = self._open, part if isinstance(part, str) else ""
        match part:
            case str():
                events = b"" if isinstance(opened, OpenMessage) else self._start(OpenMessage())
            case Reasoning(text):
                events = b"" if isinstance(opened, OpenReasoning) else self._start(OpenReasoning())
            case ToolCall(None, text):
                events = b""
                if not isinstance(opened, OpenCallItem):
                    return events  # a piece of a call that was left out
            case ToolCall(str(name), text):
                events = self._start(OpenCallItem(self._new_call_id(), self._names.get(name) or FunctionName(name)))
        assert self._open is not None, "an item is open"
        return events + self._delta(self._open, text)

    def _delta(self, item: OpenItem, text: str) -> bytes:
        logprobs: Sequence[TokenLogprob] = ()
        if not isinstance(item, OpenReasoning):  # its tokens were left out; these are of what follows
            logprobs, self._logprobs = self._logprobs, []
        item.add_text(text, logprobs)
        if not self._streams:
            return b""
        if isinstance(item, OpenMessage) and not logprobs and self._telemetry is None:
            # Formatted by hand, since almost every token of a stream takes this path.
            self._sequence += 1
            return b'%b%d,"item_id":"%b","output_index":%d,"content_index":0,"delta":%b,"logprobs":[]}\n\n' % (
                _DELTA,
                self._sequence - 1,
                item.id.encode(),
                len(self._output),
                _encode(text),
            )
        if not text and not logprobs:
            return b""
        kind, fields = item.delta(text, logprobs)
        if self._telemetry is not None:
            fields |= self._telemetry.timings()
        return self._item_events([(kind, fields)])

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
        whole = item.whole("incomplete" if self._is_cut else "completed")
        events += self._item_events(item.end(whole))
        self._open = None
        self._output.append(whole)
        return events

    def _item_events(self, events: Sequence[tuple[str, dict[str, Any]]]) -> bytes:
        """Events about the open item."""
        assert self._open is not None, "an item is open"
        place = {"item_id": self._open.id, "output_index": len(self._output)}
        return b"".join(
            self._event(kind, **(place if "item" not in fields else {"output_index": len(self._output)}), **fields)
            for kind, fields in events
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._streams:
            return b""
        number, self._sequence = self._sequence, self._sequence + 1
        data = _encode({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
