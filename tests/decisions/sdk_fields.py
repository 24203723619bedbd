"""Fields of the types of openai 3.57.0 and typesafe-sdk 0.7.5: honoured, ignored or refused.

Each type has the path of its example in the calls of `test_sdk_fields.py`. The judge of decisions compares the names
with those of the clients, so this module needs the standard library alone.
"""

from typing import Any, Literal

Use = Literal["honoured", "ignored", "refused"]

_ITEM: dict[str, Use] = {"call_id": "honoured", "id": "ignored", "status": "ignored"}
_QUESTION: dict[str, Use] = {"type": "honoured", "name": "honoured", "instructions": "honoured"}
OF_OPENAI: dict[str, tuple[tuple[Any, ...], dict[str, Use]]] = {
    "call": (
        (),
        {
            "input": "honoured",
            "model": "honoured",
            "questions": "honoured",
            "prompt_cache_key": "ignored",
            "prompt_cache_options": "ignored",
            "safety_identifier": "ignored",
        },
    ),
    "message": (
        ("input", 1),
        {"type": "honoured", "role": "honoured", "content": "honoured", "phase": "ignored"},
    ),
    "input text": (
        ("input", 1, "content", 0),
        {"type": "honoured", "text": "honoured", "prompt_cache_breakpoint": "ignored"},
    ),
    "input JSON": (
        ("input", 1, "content", 1),
        {"type": "honoured", "data": "honoured", "prompt_cache_breakpoint": "ignored"},
    ),
    "output text": (("input", 2, "content", 0), {"type": "honoured", "text": "honoured"}),
    "refusal": (("input", 2, "content", 1), {"type": "honoured", "refusal": "honoured"}),
    "function call": (
        ("input", 3),
        {
            **_ITEM,
            "type": "honoured",
            "name": "honoured",
            "arguments": "honoured",
            "namespace": "ignored",
        },
    ),
    "function output": (("input", 4), {**_ITEM, "type": "honoured", "output": "honoured"}),
    "custom call": (
        ("input", 5),
        {
            **_ITEM,
            "type": "honoured",
            "name": "honoured",
            "input": "honoured",
            "namespace": "ignored",
        },
    ),
    "custom output": (("input", 6), {**_ITEM, "type": "honoured", "output": "honoured"}),
    "predicate": (("questions", 0), _QUESTION),
    "choice": (("questions", 1), {**_QUESTION, "choices": "honoured"}),
    "option": (("questions", 1, "choices", 0), {"value": "honoured", "description": "honoured"}),
    "score": (("questions", 2), {**_QUESTION, "levels": "honoured"}),
    "level": (("questions", 2, "levels", 0), {"label": "honoured", "description": "honoured"}),
    "cache options": (("prompt_cache_options",), {"mode": "ignored", "ttl": "ignored"}),
}

OF_TYPESAFE: dict[str, tuple[tuple[Any, ...], dict[str, Use]]] = {
    "request": (
        (),
        {"model": "honoured", "state": "honoured", "questions": "honoured", "assets": "refused"},
    ),
    "noul": (
        ("questions", "n"),
        {"type": "honoured", "instructions": "honoured", "criteria": "honoured"},
    ),
    "noul criteria": (("questions", "n", "criteria"), {"true": "honoured", "false": "honoured"}),
    "choice": (
        ("questions", "c"),
        {"type": "honoured", "instructions": "honoured", "criteria": "honoured"},
    ),
    "score": (
        ("questions", "s"),
        {"type": "honoured", "instructions": "honoured", "criteria": "honoured"},
    ),
}

OF_REFUSED = {
    "openai": ("image_url", "detail"),
    "typesafe": ("format", "data_base64", "part"),
}
"""Fields of images, which are refused whole by their type."""


def names_of(client: str) -> set[str]:
    """The names of all fields of a client's types."""
    types = {"openai": OF_OPENAI, "typesafe": OF_TYPESAFE}[client]
    return {name for _, fields in types.values() for name in fields} | {*OF_REFUSED[client]}
