"""The machine that finds tool calls in generated text while it arrives, never at the cost of a word.

It takes pieces of text and gives back text and calls in their order. Text that may become a call is held back.
What turns out to be none comes out exactly as it was written: bad JSON, a tool that the request does not have, a call
that was cut off. All that is ever left out is the syntax of a call and the blanks between calls.
Each character is looked at a bounded number of times, whatever the text and its pieces.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

import msgspec

from orca_jax.text.json_end import BLANKS, JsonEnd


class ToolCall(NamedTuple):
    """One call; `arguments` is the JSON text of an object, as the model wrote it."""

    name: str
    arguments: str


Node = Mapping[str, "Node"] | Literal["object", "end"]
"""What may follow, blanks apart: a literal -> what may follow it. "object" is a call's JSON, "end" the end of calls."""


@dataclass(frozen=True)
class Dialect:
    """How calls are written. Blanks may stand around everything.

    `marker` may stand anywhere in the text and begins calls; without one they are all that the text holds.
    `first` is what leads from there to the first call, and `after` is what has to follow a call, unless the text ends.
    """

    marker: str | None
    first: Node
    after: Mapping[str, Node]


class CallParser:
    """A parser for one dialect; `read` makes a call of an object's JSON text, or None."""

    def __init__(self, dialect: Dialect, read: Callable[[str], ToolCall | None]) -> None:
        self._dialect, self._read = dialect, read
        self._out = _Output()
        self._held: list[str] = []  # undecided text of earlier pieces, followed by that of this one from `_from`
        self._text, self._from, self._at = "", 0, 0
        self._literal = ""  # of those that may follow, as far as it came
        self._call: ToolCall | None = None  # read, and waiting for what follows
        self._object = JsonEnd()
        self._node: Node | None = None if dialect.marker else dialect.first  # None: outside of calls

    def push(self, text: str) -> list[str | ToolCall]:
        """What is certain after this piece of text."""
        if self._node is None:  # at most the beginning of a marker is held
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

    def finish(self) -> list[str | ToolCall]:
        """The rest, at the end of the text."""
        self._text, self._from, self._at = "", 0, 0
        if self._call is not None and not self._literal:
            self._accept()
        self._release(0)
        return self._out.finish()

    def _search(self) -> None:
        """Look for the marker; all before it is text, and so is everything where there are no markers."""
        text, marker = self._text, self._dialect.marker
        found = -1 if marker is None else text.find(marker, self._at)
        if marker is None or found < 0:
            self._at = len(text)
            self._release(len(text) - (_overlap(text, self._from, marker) if marker else 0))
        else:
            self._release(found)
            self._at, self._node = found + len(marker), self._dialect.first

    def _follow(self, node: Mapping[str, Node]) -> None:
        """Match one character with the literals that may follow."""
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
                self._object = JsonEnd()  # it looks at the bracket again
            else:
                self._at += 1
                if self._node == "end":
                    self._drop(self._at)

    def _fail(self) -> None:
        """What is held is text. The beginning of a literal in it may be that of a marker, so it is looked at again."""
        again = len(self._literal)
        if self._at - again < self._from:  # it began in an earlier piece
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
        """The call that waited is one."""
        assert self._call is not None, "there is a call to accept"
        self._out.call(self._call)
        self._call = None
        self._drop(self._at)

    def _release(self, end: int) -> None:
        """Hand out what is held, and this piece up to `end`, as text."""
        self._out.text("".join([*self._held, self._text[self._from : end]]))
        self._drop(end)

    def _drop(self, end: int) -> None:
        """Leave out what is held, and this piece up to `end`: it was syntax."""
        self._held.clear()
        self._from = end


class _Output:
    """Text and calls in order. Blanks at the beginning and after a call wait: they are left out before a call."""

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
        """What came since the last time, adjacent texts joined."""
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
    """A call as models write it; some add an id or a type, which say nothing."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    id: str | None = None
    type: Literal["function"] | None = None


def read_call(text: str, tool_names: Collection[str]) -> ToolCall | None:
    """The call that an object is; None where it is none of these tools' or has anything that would be lost."""
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
    """JSON text of an object, also where it is written as a string that holds it; else None."""
    try:
        value = msgspec.json.decode(text)
        if isinstance(value, str):
            text, value = value, msgspec.json.decode(value)
    except (ValueError, RecursionError):
        return None
    return text.strip(BLANKS) if isinstance(value, dict) else None


def _overlap(text: str, start: int, marker: str) -> int:
    """Length of the longest beginning of `marker` with which `text` ends, from `start` on."""
    longest = min(len(marker) - 1, len(text) - start)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
