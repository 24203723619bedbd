"""Random answers of grammars, and what a validator says of them."""

import json
import random
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from jsonschema.validators import Draft202012Validator, validator_for

from orca_jax.text.grammar import GrammarConstraint, GrammarFactory
from orca_jax.text.schemas.keywords import COUNTS, WrongSchemaError
from orca_jax.text.schemas.prepared import PreparedSchema, prepared
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.errors import RequestError
from orca_jax.values.request import StructuredOutput

END = 256
FACTORY = GrammarFactory(ByteTokenizer(), 257, (END,))
_CLOSING = frozenset(b'"}],0')


def compiled(schema: object) -> GrammarConstraint:
    """Raises RequestError."""
    return FACTORY.compile(StructuredOutput("json_schema", json.dumps(schema)))


def answer(constraint: GrammarConstraint, seed: int, limit: int = 300) -> str | None:
    """A text by a random walk, which prefers ends after a while; None if it did not end."""
    chance, text = random.Random(seed), bytearray()
    for step in range(limit):
        allowed = constraint.allowed()
        ids = [token for token in range(257) if allowed >> token & 1]
        if not ids:
            return None
        closing = [token for token in ids if token == END or token in _CLOSING]
        token = chance.choice(closing if closing and chance.random() < 0.3 + step / 60 else ids)
        if token == END:
            return text.decode()
        text.append(token)
        constraint.accept(token)
    return None


def fault(schema: Any, text: str) -> str | None:
    """The first error of a validator, with exact numbers; None if the text is valid."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    kind = validator_for(exact, default=Draft202012Validator)
    errors = sorted(kind(exact).iter_errors(json.loads(text, parse_float=Decimal)), key=str)
    return f"{errors[0].message[:200]} ({list(errors[0].absolute_schema_path)})" if errors else None


def without(schema: Any, paths: Mapping[str, str]) -> Any:
    """The schema without the keywords at these paths, and without null for a count; a `oneOf` becomes an `anyOf`."""
    schema = json.loads(json.dumps(schema), object_pairs_hook=_without_null_counts)
    for path in paths:
        _remove(schema, path)
    return schema


def _without_null_counts(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if value is not None or name not in COUNTS}


def _remove(value: Any, path: str) -> None:
    keys = [
        key
        for key in (value if isinstance(value, dict) else map(str, range(len(value))))
        if starts(path, key)
    ]
    for key in keys:
        rest = path[len(key) + 1 :]
        if rest:
            _remove(value[key if isinstance(value, dict) else int(key)], rest)
        elif key == "oneOf":
            value.setdefault("allOf", []).append({"anyOf": value.pop("oneOf")})
        else:
            del value[key]


def starts(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}.")


def read(schema: Any) -> PreparedSchema | None:
    """The schema for a grammar; None if it is refused as wrong."""
    try:
        return prepared(schema)
    except WrongSchemaError:
        return None


def faults(schema: Any, seeds: range) -> tuple[str, list[str]]:
    """What becomes of a schema, and the faults of its answers.

    Returns:
        "strict" if all of it is enforced, "loose" if a part is left out, "refused" or "endless"; and the faults, with
        the answers.
    """
    found = read(schema)
    if found is None:
        return "refused", []
    wanted = without(schema, found.left_out)
    kind, wrong, number = "loose" if found.left_out else "strict", [], 0
    for seed in seeds:
        try:
            text = answer(compiled(found.schema), seed)
        except RequestError:
            return "refused", wrong
        if text is not None:
            number += 1
            if (reason := fault(wanted, text)) is not None:
                wrong.append(f"{text}: {reason}")
    return kind if number else "endless", wrong
