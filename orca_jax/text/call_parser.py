"""Finds tool calls in generated text while it arrives, without loss of text.

The parser takes pieces of text, and returns text and calls in their order. Text is held back while it may become a
call. If it does not, it is returned unchanged: invalid JSON, calls of unknown tools, incomplete calls. Only the syntax
of calls and the blanks between calls are left out. Each character is read a bounded number of times.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec

from orca_jax.text.json_end import BLANKS, JsonEnd


class ToolCall(NamedTuple):
    """One call, or a piece of one; `arguments` is JSON text of an object, as the model has generated it.

    A piece with a name begins a call. A piece without one continues the arguments of the call before it.
    """

    name: str | None
    arguments: str


class Reasoning(NamedTuple):
    """A piece of what the model has written before its answer, without the tags around it."""

    text: str


type OutputPart = str | Reasoning | ToolCall
"""A piece of the generated text by its role. Text of the answer is plain."""


Node = Mapping[str, "Node"] | Literal["object", "end"]
"""The allowed continuations, apart from blanks: literal -> node after it. "object" is the JSON of a call, "end" the
end of the calls."""


@dataclass(frozen=True)
class Dialect:
    """The syntax of calls. Blanks are allowed between all parts.

    `marker` begins calls at any place in the text; None means that the whole text consists of calls. `first` holds the
    continuations from there to the first call, and `after` those after a call. The text may also end after a call.
    """

    marker: str | None
    first: Node
    after: Mapping[str, Node]


class CallParser:
    """A parser for one dialect. `read` converts the JSON text of an object to a call, or returns None."""

    def __init__(self, dialect: Dialect, read: Callable[[str], ToolCall | None]) -> None:
        self._dialect, self._read = dialect, read
        self._out = _Output()
        self._held: list[str] = []  # undecided text of earlier pieces; it continues in this piece at `_from`
        self._text, self._from, self._at = "", 0, 0
        self._literal = ""  # the part of a literal that has arrived
        self._call: ToolCall | None = None  # complete, but undecided until its continuation
        self._object = JsonEnd()
        self._node: Node | None = None if dialect.marker else dialect.first  # None: outside of calls

    def push(self, text: str) -> list[str | ToolCall]:
        """Add a piece of text, and return the decided text and calls."""
        if self._node is None:  # the held text is at most the beginning of a marker
            text = "".join([*self._held, text])
            self._held.clear()
        self._text, self._from, self._at = text, 0, 0
        while self._at < len(self._text):
            if self._node is None:
                self._search()
            elif self._node == "object":
                self._scan_object()
            elif self._node == "end":
                self._node = None
            else:
                self._follow(self._node)
        if self._from < len(self._text):
            self._held.append(self._text[self._from :])
        return self._out.take()

    def finish(self, is_cut: bool = False) -> list[str | ToolCall]:
        """Return the rest at the end of the text. An incomplete call is text, also if a limit has cut it."""
        self._text, self._from, self._at = "", 0, 0
        if self._call is not None and not self._literal:
            self._accept()
        self._release(0)
        return self._out.finish()

    def _search(self) -> None:
        """Search for the marker. All before it is text; without a marker in the dialect, everything is."""
        text, marker = self._text, self._dialect.marker
        found = -1 if marker is None else text.find(marker, self._at)
        if marker is None or found < 0:
            self._at = len(text)
            self._release(len(text) - (_overlap(text, self._from, marker) if marker else 0))
        else:
            self._release(found)
            self._at, self._node = found + len(marker), self._dialect.first

    def _follow(self, node: Mapping[str, Node]) -> None:
        """Match one character with the allowed literals."""
        character = self._text[self._at]
        if not self._literal and character in BLANKS:
            self._at += 1
            return
        longer = self._literal + character
        if not any(literal.startswith(longer) for literal in node):
            self._fail()
        elif longer not in node:
            self._literal = longer
            self._at += 1
        else:
            self._literal = ""
            if self._call is not None:
                self._accept()
            self._node = node[longer]
            if self._node == "object":
                self._object = JsonEnd()  # it reads the bracket again
            else:
                self._at += 1
                if self._node == "end":
                    self._drop(self._at)

    def _fail(self) -> None:
        """Treat the held text as text. Its partial literal is read again, since it may begin a marker."""
        again = len(self._literal)
        if self._at - again < self._from:  # the literal began in an earlier piece
            held = "".join([*self._held, self._text[self._from : self._at]])
            self._text = held[len(held) - again :] + self._text[self._at :]
            self._held = [held[: len(held) - again]]
            self._from, self._at = 0, 0
        else:
            self._at -= again
        self._literal, self._call, self._node = "", None, None
        self._release(self._at)

    def _scan_object(self) -> None:
        self._at = self._object.feed(self._text, self._at)
        if self._object.state == "open":
            return
        written = "".join(self._held) + self._text[self._from : self._at]
        self._call = self._read(written[written.index("{") :]) if self._object.state == "done" else None
        if self._call is None:
            self._fail()
        elif self._dialect.after:
            self._node = self._dialect.after
        else:
            self._accept()
            self._drop(self._at)
            self._node = None

    def _accept(self) -> None:
        """Output the undecided call."""
        assert self._call is not None, "there is a call to accept"
        self._out.call(self._call)
        self._call = None
        self._drop(self._at)

    def _release(self, end: int) -> None:
        """Output the held text, and this piece up to `end`."""
        self._out.text("".join([*self._held, self._text[self._from : end]]))
        self._drop(end)

    def _drop(self, end: int) -> None:
        """Drop the held text and this piece up to `end`, which are syntax."""
        self._held.clear()
        self._from = end


class _Output:
    """Text and calls in order. Blanks at the beginning and after a call are held; before a call they are dropped."""

    def __init__(self) -> None:
        self._items: list[str | ToolCall] = []
        self._blanks: list[str] | None = []  # None: after words
        self._has_call = False

    def text(self, text: str) -> None:
        if not text:
            return
        if self._blanks is not None:
            self._blanks.append(text)
            if not text.strip(BLANKS):
                return
            text, self._blanks = "".join(self._blanks), None
        self._items.append(text)

    def call(self, call: ToolCall) -> None:
        self._items.append(call)
        self._blanks, self._has_call = [], True

    def take(self) -> list[str | ToolCall]:
        """Return the items since the last call, with adjacent texts joined."""
        items, self._items = self._items, []
        if len(items) < 2:
            return items
        runs = groupby(items, key=lambda item: isinstance(item, ToolCall))
        return [item for is_call, run in runs for item in (run if is_call else ["".join(map(str, run))])]

    def finish(self) -> list[str | ToolCall]:
        if self._blanks and not self._has_call:
            self._items.append("".join(self._blanks))
        self._blanks = None
        return self.take()


class _WrittenCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call as generated by models. Some models add an id or a type, which are ignored."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    id: str | None = None
    type: Literal["function"] | None = None


def read_call(text: str, tool_names: Collection[str]) -> ToolCall | None:
    """Convert the JSON text of an object to a call. Return None for an unknown tool, or if other data would be lost."""
    try:
        written = msgspec.json.decode(text, type=_WrittenCall)
        found = [text for text in (bytes(written.arguments), bytes(written.parameters)) if text]
        if written.name not in tool_names or len(found) != 1:
            return None
        arguments = read_object(found[0].decode())
    except (ValueError, RecursionError):
        return None
    return None if arguments is None else ToolCall(written.name, arguments)


def read_object(text: str) -> str | None:
    """Return the JSON text of an object, unquoted if it is in a JSON string, or None if it is not an object."""
    try:
        value = msgspec.json.decode(text)
        if isinstance(value, str):
            text, value = value, msgspec.json.decode(value)
    except (ValueError, RecursionError):
        return None
    return text.strip(BLANKS) if isinstance(value, dict) else None


def _overlap(text: str, start: int, marker: str) -> int:
    """Return the length of the longest beginning of `marker` at the end of `text`, from `start` on."""
    longest = min(len(marker) - 1, len(text) - start)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
