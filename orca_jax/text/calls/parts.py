"""Pieces of generated text that a parser returns: text, reasoning and calls."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple, Protocol


class ToolCall(NamedTuple):
    """One call, or a piece of one; `arguments` is JSON text of an object, or a piece of it.

    A piece with a name begins a call. A piece without one continues the arguments of the call before it.
    """

    name: str | None
    arguments: str


class Reasoning(NamedTuple):
    """A piece of what the model has written before its answer, without the tags around it."""

    text: str


type OutputPart = str | Reasoning | ToolCall
"""A piece of the generated text by its role. Text of the answer is plain."""


class ToolParser(Protocol):
    """Parses a text that arrives in pieces. Text and calls are returned in their order."""

    def push(self, text: str) -> Sequence[OutputPart]:
        """Add a piece of text, and return the decided text and pieces of calls."""
        ...

    def finish(self) -> Sequence[OutputPart]:
        """Return the rest at the end of the text."""
        ...


def joined(items: Sequence[str | ToolCall]) -> list[str | ToolCall]:
    """Return the same output with adjacent texts, and adjacent pieces of a call, as one item each."""
    whole: list[str | ToolCall] = []
    for is_text, run in groupby(items, key=lambda item: isinstance(item, str)):
        if is_text:
            whole.append("".join([item for item in run if isinstance(item, str)]))
            continue
        calls: list[tuple[str | None, list[str]]] = []
        for item in run:
            assert isinstance(item, ToolCall), "the run has no text"
            if item.name is not None or not calls:
                calls.append((item.name, []))
            calls[-1][1].append(item.arguments)
        whole += [ToolCall(name, "".join(pieces)) for name, pieces in calls]
    return whole
