"""Readers of calls whose arguments are JSON. The arguments pass as they come, also if they are broken."""

import re
from collections.abc import Collection
from typing import Literal

from orca_jax.text.calls.parser import CallState
from orca_jax.text.calls.parts import ToolCall
from orca_jax.text.calls.values import decoded
from orca_jax.text.json_end import BLANKS

_INSIDE = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,}\] \t\r\n]")
NAME = r"(?P<name>[a-zA-Z0-9_.-]{1,128})"
"""The name of a tool in the pattern of a `NamedCall`."""
_NOT_IN_HEAD = re.compile(r"[^a-zA-Z0-9_.\-\[\]<>|｜▁`: \t\r\n]")
_NAME_KEYS, _ARGUMENT_KEYS = ("name", "tool_name"), ("arguments", "parameters")
MOST_HEAD = 256  # characters before the arguments

_CallPart = Literal["begin", "key", "colon", "value", "arguments", "next"]


class JsonScan:
    """Finds the end of a JSON value. Only strings and brackets are read, so a broken value ends too.

    `stop` ends it anywhere outside of strings; it begins with a character that JSON does not have there. `partial` is
    the part of it that has arrived.
    """

    def __init__(self, stop: str = "") -> None:
        self.is_done = False
        self.is_stopped = False
        self.partial = ""
        self._stop = stop
        self._outside = re.compile('["{}\\[\\]' + re.escape(stop[:1]) + "]")
        self._depth = 0
        self._is_scalar: bool | None = None  # None before the first character
        self._in_string = self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. Returns the index after the value, or the end of the text."""
        if self._is_scalar is None and at < len(text):
            self._is_scalar = text[at] not in '"{['
        while at < len(text) and not self.is_done:
            if self._is_scalar:
                found = _SCALAR_END.search(text, at)
                self.is_done = found is not None
                at = len(text) if found is None else found.start()
            elif self._in_string:
                at = self._string(text, at)
            elif self.partial:
                at = self._match_stop(text, at)
            else:
                at = self._structure(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        found = _INSIDE.search(text, at)
        if found is None:
            return len(text)
        self._escaped = found[0] == "\\"
        self._in_string = self._escaped
        self.is_done = not self._in_string and self._depth == 0
        return found.end()

    def _structure(self, text: str, at: int) -> int:
        found = self._outside.search(text, at)
        if found is None:
            return len(text)
        match found[0]:
            case '"':
                self._in_string = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                self.is_done = self._depth == 0
            case first:
                self.partial = first
        return found.end()

    def _match_stop(self, text: str, at: int) -> int:
        longer = self.partial + text[at]
        if not self._stop.startswith(longer):
            self.partial = ""
            return at
        self.partial = longer
        self.is_done = self.is_stopped = longer == self._stop
        return at + 1


class _Arguments:
    """The JSON text of arguments while it arrives, without the stop."""

    def __init__(self, stop: str) -> None:
        self.scan = JsonScan(stop)
        self._kept = ""  # may be the beginning of the stop

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Read `text` from `at` on. Returns the index after the last character read, and the next piece."""
        end = self.scan.feed(text, at)
        written = self._kept + text[at:end]
        size = len(written) - len(self.scan.partial)
        self._kept = written[size:]
        return end, written[:size]

    def rest(self) -> str:
        """The held piece, at the end of the text."""
        return self._kept


class JsonCall:
    """{"name": ..., "arguments": {...}}, in any order; also "tool_name" and "parameters". Ids and a type are left out.

    `stop` is the text that ends calls, also within broken JSON.
    """

    def __init__(self, names: Collection[str], stop: str = "") -> None:
        self.state: CallState = "undecided"
        self._names = names
        self._stop = stop
        self._calls: list[ToolCall] = []
        self._phase: _CallPart = "begin"
        self._key = ""
        self._scan: JsonScan | None = None  # of a key, or of a value other than arguments
        self._raw: list[str] = []  # its text
        self._arguments: _Arguments | None = None
        self._early: list[str] = []  # arguments before the name
        self._has_arguments = False

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. Returns the index after the last character read."""
        while at < len(text) and self.state in ("undecided", "open"):
            if self._arguments is not None:
                at = self._read_arguments(self._arguments, text, at)
            elif self._scan is not None:
                start = at
                at = self._scan.feed(text, at)
                self._raw.append(text[start:at])
                if self._scan.is_done:
                    self._take("".join(self._raw))
            elif text[at] in BLANKS:
                at += 1
            else:
                at = self._step(text[at], at)
        return at

    def _read_arguments(self, arguments: "_Arguments", text: str, at: int) -> int:
        at, piece = arguments.feed(text, at)
        self._argue(piece)
        if arguments.scan.is_stopped:
            self.state = "ended" if self.state == "open" else "failed"
        if arguments.scan.is_done:
            self._arguments = None
            self._phase = "next"
        return at

    def take_pieces(self) -> list[ToolCall]:
        """Return the pieces of the call since the last `take_pieces`."""
        calls = self._calls
        self._calls = []
        return calls

    def finish(self) -> None:
        """End the text."""
        if self._arguments is not None:
            self._argue(self._arguments.rest())

    def _step(self, character: str, at: int) -> int:
        """Read one character between keys and values."""
        match self._phase, character:
            case "begin", "{":
                self._phase = "key"
            case (("key" | "next"), '"'):
                self._phase = "key"
                self._scan = JsonScan()
                self._raw = []
                return at
            case (("key" | "next"), "}"):
                self._end()
            case "next", ",":
                self._phase = "key"
            case "colon", ":":
                self._phase = "value"
            case "value", "{" if self._key in _ARGUMENT_KEYS and not self._has_arguments:
                self._phase, self._arguments, self._has_arguments = (
                    "arguments",
                    _Arguments(self._stop),
                    True,
                )
                return at
            case "value", _:
                self._scan = JsonScan()
                self._raw = []
                return at
            case _:
                self.state = "failed" if self.state == "undecided" else "done"
                return at
        return at + 1

    def _take(self, text: str) -> None:
        """Take a whole key, or a whole value other than an object of arguments."""
        self._scan = None
        value = decoded(text)
        if self._phase == "key":
            self._key = str(value)
            self._phase = "colon"
            is_known = self._key in (*_NAME_KEYS, *_ARGUMENT_KEYS, "id", "tool_call_id", "type")
            if not is_known and self.state == "undecided":  # data would be lost
                self.state = "failed"
            return
        self._phase = "next"
        if self._key in _NAME_KEYS and self.state == "undecided":
            if isinstance(value, str) and value in self._names:
                self.state = "open"
                self._calls.append(ToolCall(value, "".join(self._early)))
            else:
                self.state = "failed"
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            inner = decoded(value) if isinstance(value, str) else None
            self._argue(
                str(value).strip(BLANKS)
                if isinstance(inner, dict)
                else "{}"
                if value is None
                else text
            )

    def _argue(self, piece: str) -> None:
        if self.state == "undecided":
            self._early.append(piece)
        elif piece:
            self._calls.append(ToolCall(None, piece))

    def _end(self) -> None:
        if self.state == "open" and not self._has_arguments:
            self._argue("{}")
        self.state = "done" if self.state == "open" else "failed"


class NamedCall:
    """A call with its name before its arguments, which are JSON.

    Args:
        names: of the tools.
        head: the text before the arguments, with the group "name", as `NAME` has.
    """

    def __init__(self, names: Collection[str], head: re.Pattern[str]) -> None:
        self.state: CallState = "undecided"
        self._names = names
        self._form = head
        self._head = ""
        self._calls: list[ToolCall] = []
        self._arguments = _Arguments("")

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. Returns the index after the last character read."""
        if self.state == "undecided":
            at = self._begin(text, at)
        if self.state == "open" and at < len(text):
            at, piece = self._arguments.feed(text, at)
            self._calls.append(ToolCall(None, piece))
            if self._arguments.scan.is_done:
                self.state = "done"
        return at

    def take_pieces(self) -> list[ToolCall]:
        """Return the pieces of the call since the last `take_pieces`."""
        calls = self._calls
        self._calls = []
        return calls

    def finish(self) -> None:
        """End the text."""
        found = self._form.match(self._head)
        has_mark = "[" in self._head or "<" in self._head
        if self.state == "undecided" and found is not None and has_mark:
            self._open(found["name"])

    def _begin(self, text: str, at: int) -> int:
        other = _NOT_IN_HEAD.search(text, at)
        end = len(text) if other is None else other.start()
        self._head += text[at : min(end, at + MOST_HEAD)]
        found = self._form.fullmatch(self._head)
        if other is not None and other[0] == "{" and found is not None:
            self._open(found["name"])
        elif other is not None or len(self._head) >= MOST_HEAD:
            self.state = "failed"
        return end

    def _open(self, name: str) -> None:
        self.state = "open" if name in self._names else "failed"
        if self.state == "open":
            self._calls.append(ToolCall(name, ""))
