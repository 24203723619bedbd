"""The messages of gpt-oss: each has a header, which names its channel, and then a text.

The channel `analysis` is reasoning. With a recipient `functions.NAME` the text is the arguments of a call; the text of
other messages is the answer. Headers and markers are left out. Text that begins without a header is the answer, too.
"""

import re
from collections.abc import Collection
from typing import Literal

from orca_jax.text.calls.forms import ANY, Offer, named
from orca_jax.text.calls.offered import Tools, tool_name
from orca_jax.text.calls.parts import OutputPart, Reasoning, ToolCall
from orca_jax.text.composed import composed
from orca_jax.text.json_end import BLANKS
from orca_jax.values.request import StructuredOutput

_MESSAGE = "<|message|>"
# of headers; a prompt may end with the first part of one
_BEGINS = ("<|channel|>", "<|start|>", "to=")
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([a-zA-Z0-9_.-]{1,128})")
_MOST_HEAD = 512  # characters


class HarmonyParser:
    """A parser for text that arrives in pieces.

    Args:
        names: the tools; calls of others are text.
        is_answer: the text begins within an answer.

    Attributes:
        is_open: True up to the first text of the answer.
        is_inside: True within reasoning.
    """

    def __init__(self, names: Collection[str], *, is_answer: bool = False) -> None:
        self.is_open = not is_answer
        self.is_inside = False
        self._names = names
        self._in_head = not is_answer
        self._kind: Literal["reasoning", "call", "text"] = "text"
        self._has_words = False  # of the message
        self._held = ""

    def push(self, text: str) -> list[OutputPart]:
        """Add a piece of text, and return the decided pieces."""
        text = self._held + text
        self._held = ""
        parts: list[OutputPart] = []
        while text:
            text = self._read_head(text, parts) if self._in_head else self._read_body(text, parts)
        return parts

    def finish(self) -> list[OutputPart]:
        """Return the rest at the end of the text. A header without a message is left out."""
        held = self._held
        self._held = ""
        parts: list[OutputPart] = []
        if not self._in_head:
            self._add(held, parts)
            self._close(parts)
        elif not held.lstrip(BLANKS).startswith(_BEGINS):
            parts += [held] if held else []
        return parts

    def _read_head(self, text: str, parts: list[OutputPart]) -> str:
        """Read a header, and return the text after it; nothing if it is not complete."""
        begun = text.lstrip(BLANKS)
        head, mark, rest = begun.partition(_MESSAGE)
        if mark and head.startswith(_BEGINS):
            self._open(head, parts)
            return rest
        is_head = begun.startswith(_BEGINS) or any(one.startswith(begun) for one in _BEGINS)
        if is_head and len(text) <= _MOST_HEAD:
            self._held = text
            return ""
        self._in_head = self.is_open = False
        self._kind, self._has_words = "text", True
        return text

    def _open(self, head: str, parts: list[OutputPart]) -> None:
        channel = _CHANNEL.search(head)
        recipient = _RECIPIENT.search(head)
        if recipient is not None and recipient[1] in self._names:
            self._kind = "call"
            parts.append(ToolCall(recipient[1], ""))
        else:
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        self._in_head = False
        self._has_words = False
        self.is_inside = self._kind == "reasoning"
        self.is_open = self.is_open and self._kind != "text"

    def _read_body(self, text: str, parts: list[OutputPart]) -> str:
        """Read the text of a message, and return what follows it."""
        found = _END.search(text)
        if found is None:
            end = len(text) - _begun(text)
            self._add(text[:end], parts)
            self._held = text[end:]
            return ""
        self._add(text[: found.start()], parts)
        self._close(parts)
        self._in_head, self.is_inside = True, False
        return text[found.start() if found[0] in _BEGINS else found.end() :]

    def _add(self, text: str, parts: list[OutputPart]) -> None:
        text = text if self._has_words else text.lstrip(BLANKS)
        if not text:
            return
        self._has_words = True
        match self._kind:
            case "reasoning":
                parts.append(Reasoning(text))
            case "call":
                parts.append(ToolCall(None, text))
            case _:
                parts.append(text)

    def _close(self, parts: list[OutputPart]) -> None:
        if self._kind == "call" and not self._has_words:
            parts.append(ToolCall(None, "{}"))
        self._has_words = True


class HarmonyCalls:
    """The calls among the messages of gpt-oss."""

    def parser(self, tools: Tools) -> HarmonyParser:
        """Return a parser for the calls that a model generates by itself."""
        return HarmonyParser({tool_name(tool) for tool in tools})

    def constraint(self, offer: Offer, answer: StructuredOutput | None) -> StructuredOutput:
        """Return the constraint on the messages: reasoning, and then a call or an answer, which may be free."""
        channel, message, start, call, constrain = (
            offer.mark(f"<|{mark}|>")
            for mark in ("channel", "message", "start", "call", "constrain")
        )
        parts = dict[str, StructuredOutput]()
        text = "TEXT?"
        if answer is not None:
            parts["format"] = answer
            text = "@format"
        last = "call | final" if offer.tools else "final"
        rules = [
            f'start: ({channel} "analysis" {message} thought {start} "assistant")? ({last})',
            f'final: {channel} "final" {message} {text}',
            offer.up_to("thought", "<|end|>"),
            "WORDS: /(?s:.+)/\nTEXT: /(?s:.+)/",
            ANY,
        ]
        if offer.tools:
            one, of_tools = named(
                offer.schemas, f'"NAME" " "? {constrain}? "json"? {message} @arguments'
            )
            rules.append(f'call: {channel} "commentary to=functions." {one} {call}?')
            parts |= of_tools
        return composed("\n".join(rules), parts)


def _begun(text: str) -> int:
    """Return the length of the longest beginning of a marker at the end of `text`."""
    at = text.rfind("<")
    return len(text) - at if at >= 0 and any(one.startswith(text[at:]) for one in _ENDS) else 0
