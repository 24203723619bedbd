"""Values of arguments that are written as text, as JSON or as in Python, and their JSON."""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

_PYTHON_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|(?P<word>[A-Za-z_][A-Za-z_0-9]*)|(?P<bracket>[()])""",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|\n|.)", re.DOTALL)
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\n": "",
}
_WORDS = {"True": "true", "False": "false", "None": "null"}


def is_json(text: str) -> bool:
    """Return True if a text is a JSON value."""
    try:
        msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


def decoded(text: str) -> object:
    """Return the value of JSON text; a text that is not JSON stands for itself."""
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return text


def json_of_text(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of a value written as plain text. Its types say if it may be a string; else it is JSON."""
    value = decoded(_WORDS.get(text, text))
    kind = _kind_of(value)
    is_text = isinstance(value, str) and (value == text or "string" in kinds)
    if is_text and kinds and "string" not in kinds:
        return json_of_python(text)  # templates of Seed-OSS write lists and objects so
    if is_text or (kinds and kind not in kinds and "string" in kinds):
        return json_text(text)
    return _WORDS.get(text, text)


def _kind_of(value: object) -> str:
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
    }
    return names.get(type(value), "null")


def kinds_of(schema: object) -> frozenset[str]:
    """Return the types that a schema allows, as far as it names them; "integer" for "number", too."""
    if not isinstance(schema, Mapping):
        return frozenset()
    found: set[str] = set()
    kind = schema.get("type")
    names = [kind] if isinstance(kind, str) else _list_of(kind)
    found.update([one for one in names if isinstance(one, str)])
    values = [schema["const"]] if "const" in schema else _list_of(schema.get("enum"))
    found.update([_kind_of(value) for value in values])
    for keyword in ("anyOf", "oneOf"):
        for part in _list_of(schema.get(keyword)):
            found |= kinds_of(part)
    return frozenset(found | {"integer"} if "number" in found else found)


def _list_of(value: object) -> list[Any]:
    """Return a list of a schema; an empty one if the schema is wrong there, which nothing has checked."""
    return value if isinstance(value, list) else []


def json_text(text: str) -> str:
    """Return the JSON of a text."""
    return json.dumps(text, ensure_ascii=False)


def json_of_python(text: str) -> str:
    """Return the JSON of a literal of Python, or of JSON. A text that is neither is a string."""
    translated = _PYTHON_TOKEN.sub(_translated, text)
    return translated if is_json(translated) else json_text(text)


def _translated(token: re.Match[str]) -> str:
    if token["text"] is not None:
        return json_text(_ESCAPE.sub(_unescaped, token["text"][1:-1]))
    if token["word"] is not None:
        return _WORDS.get(token["word"], token["word"])
    return "[" if token["bracket"] == "(" else "]"


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    if code[0] in "xuU" and len(code) > 1:
        number = int(code[1:], 16)
        return chr(number) if number < 0x110000 else escape[0]
    return _ESCAPES.get(code, code if code in "\\'\"/" else escape[0])
