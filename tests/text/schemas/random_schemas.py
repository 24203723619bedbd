"""Random JSON schemas with all keywords, some of which no grammar enforces."""

import random
from typing import Any

NAMES = ("a", "b", "kind", "some name", "ä/~")
FORMATS = ("date", "uuid", "ipv4", "color")
PATTERNS = ("^[a-c]{1,3}$", "x", r"^\d+$", "^(?=a)", r"^\w\b")


def random_schema(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    made = _schema(chance, 3)
    schema = made if isinstance(made, dict) else {"anyOf": [made]}
    definitions = {name: _schema(chance, 2) for name in ("X", "Box[int]", "Größe")}
    return {**schema, "$defs": definitions}


def _schema(chance: random.Random, levels: int) -> Any:
    kind = chance.random()
    if kind < 0.03:
        return chance.random() < 0.8
    if levels == 0 or kind < 0.3:
        return _plain(chance)
    if kind < 0.4:
        return {
            "$ref": chance.choice(
                ("#/$defs/X", "#/$defs/Box%5Bint%5D", "#/$defs/Box[int]", "#/$defs/Größe")
            )
        }
    if kind < 0.52:
        key = chance.choice(("anyOf", "oneOf", "oneOf", "allOf"))
        made = {key: [_schema(chance, levels - 1) for _ in range(chance.randint(1, 3))]}
        return {**made, **(_object(chance, levels) if chance.random() < 0.3 else {})}
    if kind < 0.58:
        return _discriminated(chance, levels)
    return _object(chance, levels) if kind < 0.85 else _array(chance, levels)


def _discriminated(chance: random.Random, levels: int) -> dict[str, Any]:
    options = []
    for name in NAMES[: chance.randint(2, 4)]:
        one = _object(chance, levels)
        one["type"] = "object"
        one["properties"] = {**one.get("properties", {}), "kind": {"const": name}}
        one["required"] = [
            *{*one.get("required", ()), *(["kind"] if chance.random() < 0.8 else [])}
        ]
        options.append(one)
    return {"oneOf": options}


def _some(chance: random.Random, made: dict[str, Any], share: float) -> dict[str, Any]:
    return {key: value for key, value in made.items() if chance.random() < share}


def _plain(chance: random.Random) -> dict[str, Any]:
    made = _some(
        chance,
        {
            "minimum": chance.choice((0, -1.5, 3.0)),
            "exclusiveMaximum": chance.choice((10, 7.25)),
            "multipleOf": chance.choice((1, 0.5, 3)),
            "minLength": chance.choice((0, 2.0)),
            "maxLength": chance.choice((3, None)),
            "pattern": chance.choice(PATTERNS),
            "format": chance.choice(FORMATS),
            "title": "t",
            "not": chance.choice(({}, False, {"const": 1}, {"type": "string"})),
        },
        0.12,
    )
    if chance.random() < 0.25:
        made["enum"] = chance.sample((1, 1.0, 2.5, "a", "b", None, True, [1], {"a": "x"}), 3)
    if chance.random() < 0.85:
        made["type"] = chance.choice(
            (
                "integer",
                "number",
                "string",
                "null",
                "boolean",
                ["string", "null"],
                ["integer", "string"],
            )
        )
    return made


def _object(chance: random.Random, levels: int) -> dict[str, Any]:
    names = chance.sample(NAMES, chance.randint(0, 3))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(chance, levels - 1) for name in names},
    }
    return {
        **_some(chance, made, 0.85),
        "required": [name for name in names if chance.random() < 0.5],
        **_some(
            chance,
            {
                "additionalProperties": _schema(chance, 0),
                "patternProperties": {chance.choice(("^x", "^[ab]$")): _schema(chance, 0)},
                "propertyNames": chance.choice(
                    (
                        {"type": "string"},
                        {"enum": ["a", "kind", "z"]},
                        {"pattern": "^[a-k]+$"},
                        {"maxLength": 4},
                        False,
                    )
                ),
                "minProperties": chance.choice((0, 1, 2)),
                "maxProperties": chance.choice((1, 2, 5)),
                "dependentRequired": {"a": ["b"]},
                "if": {"required": ["a"]},
                "then": {"required": ["b"]},
                "unevaluatedProperties": chance.choice((True, False)),
                "unit": "m",
            },
            0.13,
        ),
    }


def _array(chance: random.Random, levels: int) -> dict[str, Any]:
    made = {
        "items": _schema(chance, levels - 1),
        "prefixItems": [_schema(chance, 0) for _ in range(2)],
        "minItems": chance.choice((1, 2.0)),
        "maxItems": chance.choice((1, 3)),
        "uniqueItems": chance.choice((True, False)),
        "contains": _schema(chance, 0),
        "unevaluatedItems": False,
    }
    return {"type": "array", **_some(chance, made, 0.35)}
