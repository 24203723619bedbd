"""Finds the end of a JSON object or array in text that arrives in pieces, and reads each character once."""

import re
from typing import Literal

BLANKS = " \t\r\n"

_INSIDE = re.compile(r'["\\]')
_OUTSIDE = re.compile(
    r'["{}\[\]]|[^ \t\r\n0-9:,+\-.eEtrufalsn]'
)  # brackets, quotes, and characters that are not JSON there


class JsonEnd:
    """Counts brackets outside of strings. The value is not validated, apart from its characters."""

    def __init__(self) -> None:
        self.state: Literal["open", "done", "broken"] = "open"
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Read `text` from `at` on. The first character of the value is a bracket.

        Returns:
            The index at which reading stopped: the end of the text in state "open", the end of the value in state
            "done", and the unexpected character in state "broken".
        """
        while at < len(text) and self.state == "open":
            at = self._string(text, at) if self._in_string else self._structure(text, at)
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
        return found.end()

    def _structure(self, text: str, at: int) -> int:
        found = _OUTSIDE.search(text, at)
        if found is None:
            return len(text)
        match found[0]:
            case '"':
                self._in_string = True
            case "{" | "[":
                self._depth += 1
            case "}" | "]":
                self._depth -= 1
                if self._depth == 0:
                    self.state = "done"
            case _:
                self.state = "broken"
                return found.start()
        return found.end()
