"""Structured outputs made of several: a Lark grammar that refers to others as `@name`."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from orca_jax.values.errors import UNREADABLE
from orca_jax.values.request import StructuredOutput


class _Composed(msgspec.Struct, forbid_unknown_fields=True):
    """The value of a composed output."""

    lark: str
    parts: dict[str, tuple[str, str]]  # kind and value by name


def composed(lark: str, parts: Mapping[str, StructuredOutput]) -> StructuredOutput:
    """Return the structured output of a grammar in the Lark syntax of llguidance, with `@name` for each part."""
    value = _Composed(lark, {name: (part.kind, part.value) for name, part in parts.items()})
    return StructuredOutput("composed", msgspec.json.encode(value).decode())


def composed_source(value: str, source: Callable[[StructuredOutput], str]) -> str:
    """Return the grammar of a composed output for llguidance. `source` returns that of a part.

    Raises:
        ValueError: the value is not one that `composed` makes.
    """
    try:
        read = msgspec.json.decode(value, type=_Composed)
    except UNREADABLE as error:
        raise ValueError(f"it is not a composed output: {error}") from None
    grammars: list[dict[str, Any]] = [{"name": "whole", "lark_grammar": read.lark}]
    for name, (kind, inner) in read.parts.items():
        part = StructuredOutput(kind, inner)  # type: ignore[arg-type]  # checked there
        text = source(part)
        first, *others = (
            [{"lark_grammar": text}] if part.kind == "grammar" else json.loads(text)["grammars"]
        )
        grammars += [{**first, "name": name}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def literal(text: str, specials: Mapping[str, int]) -> str:
    """Return a text in Lark: the token if it is a special token of the tokenizer, else its characters."""
    if text in specials:
        return f"<[{specials[text]}]>"
    return json.dumps(text)
