"""Items that are being generated: each knows its events and its whole form."""

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import UNSET

from orca_jax.openai.responses.conversion import FunctionName
from orca_jax.openai.responses.items import (
    CallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ShownReasoning,
    ShownText,
    new_id,
)
from orca_jax.openai.schema.answers import TokenLogprob

type ItemEvent = tuple[str, dict[str, Any]]
"""The type of an event, and its fields without its number and the place of the item."""


class OpenItem(Protocol):
    """An item that is being generated."""

    id: str

    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        """Add a piece of text."""
        ...

    def begin(self) -> list[ItemEvent]:
        """The events before the first piece."""
        ...

    def delta(self, text: str, logprobs: Sequence[TokenLogprob]) -> ItemEvent:
        """The event of a piece."""
        ...

    def end(self, whole: OutputItem) -> list[ItemEvent]:
        """The events after the last piece."""
        ...

    def whole(self, status: ItemStatus) -> OutputItem:
        """The item so far."""
        ...


class _Collected:
    """The text of an item, in pieces."""

    def __init__(self, prefix: str) -> None:
        self.id = new_id(prefix)
        self._texts: list[str] = []

    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        """Add a piece of text."""
        self._texts.append(text)

    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)


class OpenMessage(_Collected):
    """A message in the making."""

    def __init__(self) -> None:
        super().__init__("msg")
        self._logprobs: list[TokenLogprob] = []

    def add(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        """Add a piece of text."""
        super().add(text, logprobs)
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


class OpenCallItem(_Collected):
    """A call of a function in the making."""

    def __init__(self, call_id: str, name: FunctionName) -> None:
        super().__init__("fc")
        self._call_id = call_id
        self._name = name

    def begin(self) -> list[ItemEvent]:
        """The beginning of the item, without arguments."""
        return [("response.output_item.added", {"item": self.whole("in_progress")})]

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


class OpenReasoning(_Collected):
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
        return ReasoningItem(self.id, [ShownReasoning(self.text())], status)


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
