"""The reader of Gemma's calls: name{key:value,...}, with a marker on both sides of each text."""

import re

from orca_jax.text.calls.members import MembersCall
from orca_jax.text.calls.offered import Schemas
from orca_jax.text.calls.values import is_json, json_text
from orca_jax.text.json_end import BLANKS

_OUTSIDE = re.compile(r"[{}\[\],<]")
_WORD = re.compile(r"[^{}\[\],:\s][^{}\[\],:]*")
_WORDS = {"None": "null", "True": "true", "False": "false"}


class BracedCall(MembersCall):
    """A call of Gemma, from the name on. `quote` is the marker around texts."""

    def __init__(self, schemas: Schemas, quote: str) -> None:
        super().__init__(schemas)
        self._quote = quote
        self._partial = ""
        self._is_text = False  # between two markers
        self._depth = 0

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. Returns the index after the last character read."""
        if self.state == "undecided":
            at = self._read_name(text, at, "{")
        while at < len(text) and self.state == "open":
            at = self._match(text, at) if self._partial else self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        """Read up to the next character with a meaning, and this one."""
        found = text.find("<", at) if self._is_text else -1
        if not self._is_text and (match := _OUTSIDE.search(text, at)) is not None:
            found = match.start()
        if found < 0:
            self._written.append(text[at:])
            return len(text)
        self._written.append(text[at:found])
        character = text[found]
        if character == "<":
            self._partial = "<"
        elif character in "{[":
            self._depth += 1
            self._written.append(character)
        elif character in "}]" and self._depth:
            self._depth -= 1
            self._written.append(character)
        elif character == "," and self._depth:
            self._written.append(character)
        else:
            self._add_member()
            if character != ",":
                self._close()
        return found + 1

    def _match(self, text: str, at: int) -> int:
        """Read one character of what may be a marker."""
        longer = self._partial + text[at]
        if not self._quote.startswith(longer):
            self._written.append(self._partial)
            self._partial = ""
            return at
        self._partial = longer
        if longer == self._quote:
            self._written.append(self._quote)
            self._is_text = not self._is_text
            self._partial = ""
        return at + 1

    def _add_member(self) -> None:
        written = "".join(self._written)
        self._written = []
        key, colon, value = written.partition(":")
        if colon:
            self._add(f"{json_text(key.strip(BLANKS))}: {self._json_of(value)}")
        elif written.strip(BLANKS):  # broken, but the call's
            self._add(written)

    def _json_of(self, value: str) -> str:
        """The JSON of a value. Keys within it, and words that are not JSON, are texts without markers."""
        parts = value.split(self._quote)
        shown = [
            json_text(part) if number % 2 else _WORD.sub(_quoted, part)
            for number, part in enumerate(parts)
        ]
        whole = "".join(shown)
        return whole if is_json(whole) else json_text(value)


def _quoted(word: re.Match[str]) -> str:
    text = word[0].rstrip(BLANKS)
    text = _WORDS.get(text, text)
    is_key = word.string[word.end() : word.end() + 1] == ":"
    return text if not is_key and is_json(text) else json_text(text)
