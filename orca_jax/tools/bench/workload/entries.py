"""The entries of long files, one at a time: lines of JSON, and elements of arrays within a document."""

import json
import re
from collections.abc import Iterator
from typing import IO, Any

from orca_jax.values.checks import json_value

READ = 2**16
"""Characters that are read at once, at least."""
MOST_CHARACTERS = 2**26
"""Of one entry: a line, or an element."""

type NumberedValue = tuple[int, Any]
"""The number of a line, and the value of JSON that begins there."""


class LineError(Exception):
    """An entry that cannot be parsed."""

    def __init__(self, line: int, reason: object) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = str(reason)


def lines(file: IO[str]) -> Iterator[NumberedValue]:
    """The values of a file of JSON lines."""
    number = 0
    while text := file.readline(MOST_CHARACTERS):
        number += 1
        if len(text) == MOST_CHARACTERS:
            raise LineError(number, f"it has more than {MOST_CHARACTERS} characters")
        if text.isspace():
            continue
        try:
            yield number, json_value(text)
        except ValueError as error:
            raise LineError(number, error) from error


def elements(opening: str, file: IO[str]) -> Iterator[NumberedValue]:
    """The elements of each array that begins after `opening`, without the rest of the document in memory."""
    decoder = json.JSONDecoder()
    text = _Window(file)
    while text.skip_to(opening):
        while (sign := text.next_sign()) != "]":
            if sign == ",":
                text.drop(1)
                continue
            line = text.line
            yield line, text.value(decoder)
        text.drop(1)


class _Window:
    """The part of a file that is being parsed."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._text = ""
        self._at = 0
        self.line = 1

    def drop(self, count: int) -> None:
        """Go on behind so many characters."""
        end = self._at + count
        self.line += self._text.count("\n", self._at, end)
        self._at = end

    def skip_to(self, opening: str) -> bool:
        """Go behind the next match of a pattern; False: there is none."""
        while True:
            if match := re.compile(opening).search(self._text, self._at):
                self.drop(match.end() - self._at)
                return True
            self.drop(max(0, len(self._text) - self._at - READ))
            if not self._more():
                return False

    def next_sign(self) -> str:
        """The next character that is no space."""
        while True:
            rest = re.compile(r"\s*").match(self._text, self._at)
            assert rest is not None, "it matches nothing, too"
            self.drop(rest.end() - self._at)
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise LineError(self.line, "the file ends within a list")

    def value(self, decoder: json.JSONDecoder) -> Any:
        """The next value; its text doubles until it is whole."""
        while True:
            fault = None
            try:
                value, end = decoder.raw_decode(self._text, self._at)
            except RecursionError:
                raise LineError(self.line, "it is nested too deeply") from None
            except json.JSONDecodeError as error:
                end = len(self._text)
                fault = LineError(error.lineno + self._lines_before, error.msg)
            if end - self._at > MOST_CHARACTERS:
                raise LineError(self.line, f"it has more than {MOST_CHARACTERS} characters")
            if fault is None:
                self.drop(end - self._at)
                return value
            if not self._more():
                raise fault

    @property
    def _lines_before(self) -> int:
        """Lines of the file before the text."""
        return self.line - 1 - self._text.count("\n", 0, self._at)

    def _more(self) -> bool:
        more = self._file.read(max(READ, len(self._text) - self._at))
        if more:
            self._text = self._text[self._at :] + more
            self._at = 0
        return bool(more)
