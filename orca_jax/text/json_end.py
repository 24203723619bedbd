"""Ends of JSON objects and arrays: found in text that arrives in pieces, and added to a text that was cut."""

import json
import re
from typing import Any, Literal

BLANKS = " \t\r\n"

_MOST_DEPTH = 200  # of a text that was cut
_PARTS = re.compile(r'"(?:[^"\\]|\\.)*+"|["{}\[\],]', re.DOTALL)  # whole strings, and the quote of one that was cut
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


def cut_object(text: str) -> dict[str, Any] | None:
    """The value of a JSON object that was cut: with an end, and without its last member if that cannot be read.

    Returns:
        None if the text is not the beginning of an object, or is nested too deeply.
    """
    ends: list[str] = []  # of the open brackets
    kept, tail = 0, ""
    kept_ends = ends.copy()
    for part in _PARTS.finditer(text):
        match part[0]:
            case "{" | "[" as bracket:
                ends.append("}" if bracket == "{" else "]")
                kept, kept_ends = part.end(), ends.copy()
            case "}" | "]" as end:
                if not ends or ends.pop() != end or not ends:
                    return None
            case ",":
                kept, kept_ends = part.start(), ends.copy()
            case '"':
                tail = '"'
                break
        if len(ends) > _MOST_DEPTH:
            return None
    candidates = [text + tail + "".join(reversed(ends))]
    rest = text[kept:].lstrip(f"{BLANKS},")
    if kept_ends[-1:] == ["]"] or not rest or rest.startswith('"'):  # else no key begins there
        candidates.append(text[:kept] + "".join(reversed(kept_ends)))
    for candidate in candidates:
        try:
            value = json.loads(candidate)
        except ValueError:
            continue
        return value if isinstance(value, dict) else None
    return None
