"""Ends of JSON objects that were cut."""

import contextlib
import json
import re
from collections.abc import Iterable
from typing import Any

BLANKS = " \t\r\n"

_MOST_DEPTH = 200  # of a text that was cut
# whole strings, and the quote of one that was cut
_PARTS = re.compile(r'"(?:[^"\\]|\\.)*+"|["{}\[\],]', re.DOTALL)


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
                ends.append({"{": "}", "[": "]"}[bracket])
                kept = part.end()
                kept_ends = ends.copy()
            case "}" | "]" as end:
                if not ends or ends.pop() != end or not ends:
                    return None
            case ",":
                kept = part.start()
                kept_ends = ends.copy()
            case '"':
                tail = '"'
                break
        if len(ends) > _MOST_DEPTH:
            return None
    candidates = [text + tail + "".join(reversed(ends))]
    rest = text[kept:].lstrip(f"{BLANKS},")
    if kept_ends[-1:] == ["]"] or not rest or rest.startswith('"'):  # else no key begins there
        candidates.append(text[:kept] + "".join(reversed(kept_ends)))
    return _first_object(candidates)


def _first_object(candidates: Iterable[str]) -> dict[str, Any] | None:
    """The value of the first text that is JSON; None if it is no object."""
    for candidate in candidates:
        with contextlib.suppress(ValueError):
            value = json.loads(candidate)
            return value if isinstance(value, dict) else None
    return None
