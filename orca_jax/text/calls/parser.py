"""Finds tool calls in generated text while it arrives, without loss of text.

The parser takes pieces of text, and returns text and pieces of calls in their order. Text is held back while it may
become a call: until the name of a tool is known. From then on it is a call, also if its JSON breaks or if the text ends
early. If it does not become one, it is returned unchanged. Only the syntax of calls and the blanks between calls are
left out. Each character is read a bounded number of times.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from orca_jax.text.calls.parts import OutputPart, ToolCall, joined
from orca_jax.text.json_end import BLANKS

CallState = Literal["undecided", "open", "done", "ended", "failed"]
"""Of the reading of one call. "open": the name is known. "done": the call has ended; "ended": the end of all calls was
read, too. "failed": this is no call."""


class CallReader(Protocol):
    """Reads the text of one call."""

    state: CallState

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. Returns the index after the last character read."""
        ...

    def take_pieces(self) -> list[ToolCall]:
        """Return the pieces of the call since the last `take_pieces`."""
        ...

    def finish(self) -> None:
        """End the text. An undecided call is opened if its name is known."""
        ...


Node = Mapping[str, "Node"] | str
"""The allowed continuations, apart from blanks: literal -> node after it; the literal "" stands for any other text. A
text names the reader of a call; "end" is the end of the calls."""


@dataclass(frozen=True)
class Syntax:
    """The syntax around calls. Blanks are allowed between all parts.

    A key of `markers` begins calls at any place in the text, and its value is the node after it. `start` is the node at
    the begin of the text; None if it is text. `after` has the node after a call by the name of its reader, and the text
    may also end there; without one, text follows.
    """

    markers: Mapping[str, Node]
    start: Node | None = None
    after: Mapping[str, Mapping[str, Node]] = field(default_factory=dict)


class CallParser:
    """A parser of calls in one syntax. `make` makes a reader of calls by its name in the syntax."""

    def __init__(self, syntax: Syntax, make: Callable[[str], CallReader]) -> None:
        self._syntax = syntax
        self._make = make
        self._starts = re.compile(
            f"[{''.join(re.escape(one[0]) for one in syntax.markers)}]"
            if syntax.markers
            else "(?!)"
        )
        self._markers = re.compile("|".join(map(re.escape, syntax.markers)) or r"(?!)")
        self._out = _Output()
        # undecided text of earlier pieces; it continues in this piece at `_from`
        self._held: list[str] = []
        self._text = ""
        self._from = 0
        self._at = 0
        self._literal = ""  # the part of a literal that has arrived
        self._reader: CallReader | None = None
        self._kind = ""  # the name of the reader, also after its call
        self._node: Mapping[str, Node] | None = None  # None: outside of calls
        self._is_after = False  # within the syntax after a call
        if syntax.start is not None:
            self._enter(syntax.start)

    def push(self, text: str) -> Sequence[OutputPart]:
        """Add a piece of text, and return the decided text and calls."""
        # the held text is at most the beginning of a marker
        if self._node is None and self._reader is None:
            if not self._held and self._out.is_plain and not self._starts.search(text):
                return [text]  # the usual case
            text = "".join([*self._held, text])
            self._held.clear()
        self._text = text
        self._from = 0
        self._at = 0
        while self._at < len(self._text):
            if self._reader is not None:
                self._read(self._reader)
            elif self._node is None:
                self._search()
            else:
                self._follow(self._node)
        if self._from < len(self._text):
            self._held.append(self._text[self._from :])
        return self._out.take_items()

    def finish(self) -> Sequence[OutputPart]:
        """Return the rest at the end of the text. The beginning of an end of calls is left out."""
        self._text = ""
        self._from = 0
        self._at = 0
        if self._reader is not None:
            self._reader.finish()
            self._read(self._reader)
        elif self._literal and self._is_after:
            self._drop(0)
        self._release(0)
        return self._out.finish()

    def _search(self) -> None:
        """Search for a marker. All before it is text."""
        text = self._text
        found = self._markers.search(text, self._at)
        if found is None:
            self._at = len(text)
            self._release(
                len(text)
                - max([_overlap(text, self._from, one) for one in self._syntax.markers], default=0)
            )
        else:
            self._release(found.start())
            self._at = found.end()
            self._enter(self._syntax.markers[found[0]])

    def _follow(self, node: Mapping[str, Node]) -> None:
        """Match one character with the allowed literals."""
        character = self._text[self._at]
        if not self._literal and character in BLANKS:
            self._at += 1
            return
        longer = self._literal + character
        if longer in node:
            self._literal = ""
            self._at += 1
            self._enter(node[longer])
        elif any([literal.startswith(longer) for literal in node]):
            self._literal = longer
            self._at += 1
        else:
            self._rewind()
            if "" in node:
                self._enter(node[""])
            else:
                self._fail()

    def _enter(self, node: Node) -> None:
        if isinstance(node, Mapping):
            self._node = node
            if self._is_after:
                self._drop(self._at)
        elif node == "end":
            self._drop(self._at)
            self._node, self._is_after = None, False
        else:
            self._reader = self._make(node)
            self._kind = node
            self._is_after = False

    def _read(self, reader: CallReader) -> None:
        self._at = reader.feed(self._text, self._at)
        for call in reader.take_pieces():
            self._out.call(call)
        match reader.state:
            case "failed":
                self._fail()
            case "open":
                self._drop(self._at)
            case "done" | "ended":
                self._drop(self._at)
                self._reader = None
                self._node = self._syntax.after.get(self._kind) if reader.state == "done" else None
                self._is_after = self._node is not None

    def _rewind(self) -> None:
        """Go back to the begin of a partial literal, which is not one."""
        again = len(self._literal)
        if self._at - again < self._from:  # the literal began in an earlier piece
            held = "".join([*self._held, self._text[self._from : self._at]])
            self._text = held[len(held) - again :] + self._text[self._at :]
            self._held = [held[: len(held) - again]]
            self._from, self._at = 0, 0
        else:
            self._at -= again
        self._literal = ""

    def _fail(self) -> None:
        """Treat the held text as text."""
        self._reader = None
        self._node = None
        self._is_after = False
        self._release(self._at)

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

    @property
    def is_plain(self) -> bool:
        """True if further text is output as it is."""
        return self._blanks is None and not self._items

    def text(self, text: str) -> None:
        if not text:
            return
        if self._blanks is not None:
            self._blanks.append(text)
            if not text.strip(BLANKS):
                return
            text = "".join(self._blanks)
            self._blanks = None
        self._items.append(text)

    def call(self, call: ToolCall) -> None:
        self._items.append(call)
        self._blanks, self._has_call = [], True

    def take_items(self) -> list[str | ToolCall]:
        """Return the items since the last `take_items`, with adjacent texts, and adjacent pieces of a call, joined."""
        items = self._items
        self._items = []
        return items if len(items) < 2 else joined(items)

    def finish(self) -> list[str | ToolCall]:
        if self._blanks and not self._has_call:
            self._items.append("".join(self._blanks))
        self._blanks = None
        return self.take_items()


def _overlap(text: str, start: int, marker: str) -> int:
    """Return the length of the longest beginning of `marker` at the end of `text`, from `start` on."""
    longest = min(len(marker) - 1, len(text) - start)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
