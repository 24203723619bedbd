"""As much of JSON Schema as `/openapi.json` uses, so that the document can be held against what the server does."""

import math
import re
from collections.abc import Mapping
from typing import Any

KINDS: Mapping[str, Any] = {
    "string": str,
    "array": list,
    "object": dict,
    "boolean": bool,
    "null": type(None),
}
KNOWN = {
    *(
        "$ref",
        "anyOf",
        "enum",
        "const",
        "type",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "pattern",
        "items",
    ),
    *(
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "propertyNames",
    ),
    *(
        "properties",
        "required",
        "additionalProperties",
        "title",
        "description",
        "default",
        "discriminator",
        "oneOf",
    ),
    "not",
}


def fits(schema: Mapping[str, Any], value: Any, document: Mapping[str, Any]) -> bool:
    """Whether a value is what the schema says."""
    assert set(schema) <= KNOWN, f"unknown to this test: {set(schema) - KNOWN}"
    if "$ref" in schema:
        return fits(
            document["components"]["schemas"][schema["$ref"].rpartition("/")[2]], value, document
        )
    if "anyOf" in schema:
        return any(fits(one, value, document) for one in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return any(same(one, value) for one in values)
    if "not" in schema and fits(schema["not"], value, document):
        return False
    if "oneOf" in schema and sum(fits(one, value, document) for one in schema["oneOf"]) != 1:
        return False
    kinds = schema.get("type", [])
    if kinds and not any(
        of_kind(kind, value) for kind in ([kinds] if isinstance(kinds, str) else kinds)
    ):
        return False
    return in_range(schema, value) and parts_fit(schema, value, document)


def same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def of_kind(kind: str, value: Any) -> bool:
    if kind in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and (kind == "number" or isinstance(value, int) or value.is_integer())
    return isinstance(value, KINDS[kind])


def in_range(schema: Mapping[str, Any], value: Any) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        return low <= value <= high and value > schema.get("exclusiveMinimum", -math.inf)
    for kind, least, most in (
        (str, "minLength", "maxLength"),
        (list, "minItems", "maxItems"),
        (dict, "minProperties", "maxProperties"),
    ):
        if isinstance(value, kind) and not schema.get(least, 0) <= len(value) <= schema.get(
            most, math.inf
        ):
            return False
    return (
        not (isinstance(value, str) and "pattern" in schema)
        or re.search(schema["pattern"], value) is not None
    )


def parts_fit(schema: Mapping[str, Any], value: Any, document: Mapping[str, Any]) -> bool:
    if isinstance(value, list):
        return all(fits(schema.get("items", {}), one, document) for one in value)
    if not isinstance(value, dict):
        return True
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    names = schema.get("propertyNames", {})
    return (
        all(name in value for name in schema.get("required", ()))
        and all(fits(names, name, document) for name in value)
        and all(
            fits(properties[name], one, document)
            if name in properties
            else rest is not False and (rest is True or fits(rest, one, document))
            for name, one in value.items()
        )
    )
