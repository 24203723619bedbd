"""Readers of calls whose arguments are written one by one: in tags, or as in Python. They are given as JSON."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from orca_jax.text.calls.offered import Schemas
from orca_jax.text.calls.parser import CallState
from orca_jax.text.calls.parts import ToolCall
from orca_jax.text.calls.values import json_of_python, json_of_text, json_text, kinds_of
from orca_jax.text.json_end import BLANKS

MOST_NAME = 160  # characters up to the end of a name, with blanks
_NAME = re.compile(r"\s*([a-zA-Z0-9_.-]{1,128})\s*")
_IN_PYTHON = re.compile(r"""["'()\[\]{},]""")
_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}


class MembersCall:
    """A call whose arguments become the members of a JSON object."""

    def __init__(self, schemas: Schemas) -> None:
        self.state: CallState = "undecided"
        self._schemas = schemas
        self._calls: list[ToolCall] = []
        self._written: list[str] = []  # the text of the name, key or value that is being read
        self._schema: Mapping[str, Any] = {}
        self._num_members = 0

    def take_pieces(self) -> list[ToolCall]:
        """Return the pieces of the call since the last `take_pieces`."""
        calls = self._calls
        self._calls = []
        return calls

    def finish(self) -> None:
        """End the text: a call without an end keeps its whole arguments."""

    def _read_name(self, text: str, at: int, end: str) -> int:
        """Read up to the character that ends the name, and open the call."""
        found = text.find(end, at)
        stop = len(text) if found < 0 else found
        self._written.append(text[at : min(stop, at + MOST_NAME)])
        name = "".join(self._written)
        match = _NAME.fullmatch(name)
        if found >= 0 and match is not None and match[1] in self._schemas:
            self.state = "open"
            self._schema = self._schemas[match[1]]
            self._calls.append(ToolCall(match[1], "{"))
            self._written = []
            return found + 1
        if found >= 0 or len(name) >= MOST_NAME or (match is None and name.strip(BLANKS)):
            self.state = "failed"
        return stop

    def _add(self, member: str) -> None:
        self._calls.append(ToolCall(None, f", {member}" if self._num_members else member))
        self._num_members += 1

    def _close(self) -> None:
        self._calls.append(ToolCall(None, "}"))
        self.state = "done"


class Tags(NamedTuple):
    """The texts around the keys and values of a call."""

    first: str  # before the name
    name_end: str  # a character
    key: str  # before a key
    value: str  # between a key, its end, and the value
    end: str  # after a value
    ends: tuple[str, ...]  # of a call; the last one ends all calls
    key_end: str = ""
    has_lines: bool = False  # a value is on its own lines


class TaggedCall(MembersCall):
    """A call in tags, from the name on: <parameter=KEY>VALUE</parameter> for each argument, or other tags.

    The schema of the tool says if a value is a string or JSON. Text between the tags is left out.
    """

    def __init__(self, schemas: Schemas, tags: Tags) -> None:
        super().__init__(schemas)
        self._tags = tags
        self._all = (tags.key, *tags.ends)
        self._tag = ""  # the part of a tag that has arrived
        self._key: str | None = None
        self._is_value = False
        self._kinds: dict[str, frozenset[str]] = {}  # types of the arguments so far

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. Returns the index after the last character read."""
        if self.state == "undecided":
            at = self._read_name(text, at, self._tags.name_end)
            self._tag = "<" if self._tags.name_end == "<" else ""
        while at < len(text) and self.state == "open":
            if self._key is None:
                at = self._read_tag(text, at)
            elif self._is_value:
                at = self._read_value(text, at, self._key)
            else:
                at = self._read_key(text, at)
        return at

    def _read_tag(self, text: str, at: int) -> int:
        if not self._tag and text[at] != "<":
            start = text.find("<", at)
            return len(text) if start < 0 else start
        self._tag += text[at]
        if self._tag == self._tags.key:
            self._tag, self._key = "", ""
        elif self._tag in self._tags.ends:
            is_end = self._tag == self._tags.ends[-1]
            self._close()
            self.state = "ended" if is_end else "done"
        elif not any([tag.startswith(self._tag) for tag in self._all]):
            self._tag = "<" if text[at] == "<" else ""
        return at + 1

    def _read_key(self, text: str, at: int) -> int:
        at, key = self._read_until(text, at, self._tags.value)
        if key is not None:
            key_end = self._tags.key_end
            self._key = key.rstrip(BLANKS).removesuffix(key_end) if key_end else key
            self._is_value = True
        return at

    def _read_value(self, text: str, at: int, key: str) -> int:
        at, value = self._read_until(text, at, self._tags.end)
        if value is not None:
            if self._tags.has_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            self._add(f"{json_text(key)}: {json_of_text(value, self._kinds_of(key))}")
            self._key, self._is_value = None, False
        return at

    def _kinds_of(self, key: str) -> frozenset[str]:
        """The types of an argument, read once for all its values."""
        properties = self._schema.get("properties")
        if not isinstance(properties, Mapping) or key not in properties:
            return frozenset()
        if key not in self._kinds:
            self._kinds[key] = kinds_of(properties[key])
        return self._kinds[key]

    def _read_until(self, text: str, at: int, end: str) -> tuple[int, str | None]:
        """Read up to the end of `end`. Returns the index after the last character read, and the text before `end`."""
        keep = len(end) - 1
        # the end may have begun in earlier pieces
        tail = "".join(self._written[-keep:])[-keep:] if keep else ""
        found = (tail + text[at : at + keep]).find(end) - len(tail) + at
        if found < at - len(tail):
            found = text.find(end, at)
            if found < 0:
                self._written.append(text[at:])
                return len(text), None
        stop = found + len(end)
        written = "".join([*self._written, text[at:stop]]).removesuffix(end)
        self._written = []
        return stop, written


class PythonCall(MembersCall):
    """A call as in Python, from the name on: name(key=value, ...)."""

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(schemas)
        self._quote = ""  # of the string that is being read
        self._is_escaped = False
        self._depth = 0

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. Returns the index after the last character read."""
        if self.state == "undecided":
            at = self._read_name(text, at, "(")
        while at < len(text) and self.state == "open":
            start, (at, end) = at, self._next(text, at)
            self._written.append(text[start : at - len(end)])
            if end:
                self._add_argument()
            if end == ")":
                self._close()
        return at

    def _next(self, text: str, at: int) -> tuple[int, str]:
        """Read up to the next character with a meaning. Returns the index after it, and the end of an argument."""
        if self._is_escaped:
            self._is_escaped = False
            return at + 1, ""
        found = (_IN_STRING[self._quote] if self._quote else _IN_PYTHON).search(text, at)
        if found is None:
            return len(text), ""
        character = found[0]
        if self._quote:
            self._is_escaped = character == "\\"
            self._quote = self._quote if self._is_escaped else ""
        elif character in "\"'":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif self._depth and character in ")]}":
            self._depth -= 1
        elif not self._depth and character in ",)":
            return found.end(), character
        return found.end(), ""

    def _add_argument(self) -> None:
        written = "".join(self._written)
        self._written = []
        key, equals, value = written.partition("=")
        if equals:
            self._add(f"{json_text(key.strip(BLANKS))}: {json_of_python(value.strip(BLANKS))}")
        elif written.strip(BLANKS):  # an argument without a name: broken, but the call's
            self._add(written)
