"""Halves of characters in a body: JSON can escape them alone, but no text in UTF-8 has them."""

import json
import re
from typing import Any

from orca_jax.values.errors import UNREADABLE

_LONE = re.compile("[\ud800-\udfff]")  # those of a pair are one character after decoding
_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def lone_surrogate(body: bytes) -> str | None:
    """The path of the first text with half of a character, such as "messages[0].content"; None if there is none."""
    if not _ESCAPE.search(body):
        return None
    try:
        value = json.loads(body, parse_int=len, parse_float=len)  # numbers of any length
    except UNREADABLE:
        return None
    pending: list[tuple[str, Any]] = [("", value)]
    while pending:
        path, one = pending.pop()
        if isinstance(one, str) and _LONE.search(one):
            return path
        if isinstance(one, dict):
            if broken := [name for name in one if _LONE.search(name)]:
                return _LONE.sub("?", f"{path}.{broken[0]}".lstrip("."))
            pending += [
                (f"{path}.{name}".lstrip("."), inner) for name, inner in reversed(one.items())
            ]
        elif isinstance(one, list):
            pending += [
                (f"{path}[{index}]", inner) for index, inner in reversed(list(enumerate(one)))
            ]
    return None
