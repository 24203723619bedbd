"""A schema made ready for a grammar: what it allows, and what is left out by name."""

import json
import random
import re
from typing import Any

import pytest

from orca_jax.text.schemas.keywords import PLAIN_PATTERNS, WrongSchemaError
from orca_jax.text.schemas.prepared import prepared
from orca_jax.values.errors import RequestError
from tests.text.schemas.answers import END, compiled

STRING, NUMBER = {"type": "string"}, {"type": "number"}


def takes(schema: dict[str, Any], text: str) -> bool:
    """True if the text may be generated for the schema, and may end there."""
    constraint = compiled(prepared(schema).schema)
    for token in text.encode():
        if not constraint.allowed() >> token & 1:
            return False
        constraint.accept(token)
    return bool(constraint.allowed() >> END & 1)


def kind(constant: str, /, **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"kind": {"const": constant}, **fields},
        "required": ["kind"],
    }


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


CAT, DOG = kind("cat", lives={"type": "integer"}), kind("dog", name=STRING)
PETS = {
    "Cat": CAT,
    "Dog": DOG,
    "Leaf": kind("leaf"),
    "Tree": kind("tree", left=ref("Any"), right=ref("Any")),
}
PETS["Any"] = {"oneOf": [ref("Leaf"), ref("Tree")]}

# schema, texts that match, texts that do not; all of it is enforced
ENFORCED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (
        {"oneOf": [ref("Cat"), ref("Dog")], "$defs": PETS},
        ['{"kind":"cat","lives":9}', '{"kind":"dog"}'],
        ['{"kind":"cat","name":"x"}', '{"kind":"cow"}'],
    ),
    ({"oneOf": [CAT, DOG], "discriminator": {"propertyName": "kind"}}, ['{"kind":"dog"}'], ['{"kind":"cow"}']),
    (
        {**ref("Any"), "$defs": PETS},
        ['{"kind":"tree","left":{"kind":"leaf"},"right":{"kind":"tree"}}'],
        ['{"kind":"leaf","left":{"kind":"leaf"}}'],
    ),
    ({"oneOf": [{"type": "null"}, ref("Cat")], "$defs": PETS}, ["null", '{"kind":"cat"}'], ['{"kind":"dog"}']),
    ({"oneOf": [{"const": 1, "title": "one"}, {"const": 2}]}, ["1", "2"], ["3"]),
    ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]}, ["3", "5"], ["4"]),
    # names of properties
    ({"type": "object", "propertyNames": STRING, "additionalProperties": NUMBER}, ['{"x":1}'], ['{"x":"y"}']),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": NUMBER, "required": ["a"]},
        ['{"a":1}', '{"a":1,"b":2}'],
        ['{"b":1}', '{"c":1}', '{"a":""}'],
    ),
    ({"type": "object", "propertyNames": {**STRING, "pattern": "^a+$"}}, ['{"aa":1}', "{}"], ['{"b":1}']),
    ({"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"äé":1}'], ['{"ä":1}', '{"abcd":1}']),
    ({"type": "object", "propertyNames": ref("N"), "$defs": {"N": {"enum": ["a"]}}}, ['{"a":1}'], ['{"b":1}']),
    ({"type": "object", "propertyNames": False}, ["{}"], ['{"a":1}']),
    ({"type": "object", "properties": {"a": {}, "b": {}}, "propertyNames": {"const": "a"}}, ['{"a":1}'], ['{"b":1}']),
    # references
    ({**ref("Box[int]"), "$defs": {"Box[int]": NUMBER}}, ["1"], ["null"]),
    ({**ref("Box%5Bint%5D"), "$defs": {"Box[int]": NUMBER}}, ["1"], ["null"]),
    ({**ref("a name~1Größe~0x"), "$defs": {"a name/Größe~x": NUMBER}}, ["1"], ["null"]),
    ({"type": "array", "items": {"$ref": "#/$defs/a%25b"}, "$defs": {"a%b": NUMBER}}, ["[1]"], ['[""]']),
    ({"$ref": "#/properties/a", "properties": {"a": NUMBER}}, ["1"], ["null"]),
    ({"$ref": "#here", "$defs": {"x": {"$anchor": "here", "type": "number"}}}, ["1"], ["null"]),
    ({"$id": "https://e.org/s", "$ref": "https://e.org/s#/$defs/x", "$defs": {"x": NUMBER}}, ["1"], ["null"]),
    ({**ref("a"), "$defs": {"a": ref("b"), "b": {**ref("c"), "title": "t"}, "c": NUMBER}}, ["1"], ["null"]),
    (
        {"properties": {"a": ref("a b"), "b": ref("a_b")}, "$defs": {"a b": NUMBER, "a_b": STRING}},
        ['{"a":1,"b":""}'],
        ['{"b":1}'],
    ),
    # values by their meaning
    ({"type": "array", "minItems": 1.0, "maxItems": 2.0, "items": NUMBER}, ["[1]", "[1,2]"], ["[]", "[1,2,3]"]),
    ({"type": "string", "pattern": None, "maxLength": None, "enum": ["a", None]}, ['"a"'], ['"b"', "null"]),
    ({"const": None}, ["null"], ["1"]),
    ({"enum": [1.0]}, ["1"], ["2"]),
    ({"type": "integer", "maximum": 2**63 - 1}, ["9223372036854774784"], ["9223372036854775808"]),
    ({"type": "integer", "minimum": -(2**70)}, ["-1"], []),
    # keywords without effect, or with one that others have
    ({"type": "array", "uniqueItems": False, "items": NUMBER}, ["[1,1]"], []),
    ({"type": "array", "uniqueItems": True, "maxItems": 1, "items": NUMBER}, ["[1]"], ["[1,1]"]),
    ({"type": "object", "properties": {"a": {"not": {}}, "b": NUMBER}}, ['{"b":1}'], ['{"a":1}']),
    ({"type": "object", "properties": {"a": {}}, "required": ["a"], "minProperties": 1}, ['{"a":1}'], ["{}"]),
    ({"type": "object", "properties": {"a": {}}, "maxProperties": 1}, ['{"a":1}', "{}"], []),
    ({"type": "object", "additionalProperties": NUMBER, "minProperties": 1}, ['{"a":1}'], ["{}"]),
    ({"type": "array", "items": [NUMBER], "additionalItems": False}, ["[1]"], ["[1,2]"]),
    (
        {"allOf": [ref("Cat")], "properties": {"a": {}}, "unevaluatedProperties": False, "$defs": PETS},
        ['{"kind":"cat","a":1}'],
        ['{"kind":"cat","b":1}'],
    ),
    ({"type": "object", "unevaluatedProperties": NUMBER}, ['{"a":1}'], ['{"a":""}']),
    ({"title": "t", "x-order": 1, "deprecated": True, "type": "number"}, ["1"], ["null"]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ENFORCED)))
def test_what_is_enforced(number: int) -> None:
    schema, matching, others = ENFORCED[number]
    before = json.dumps(schema)
    found = prepared(schema)
    assert not found.left_out and not found.annotations
    assert [text for text in matching if not takes(schema, text)] == []
    assert [text for text in others if takes(schema, text)] == []
    assert json.dumps(schema) == before, "the caller's schema stays as it is"
    again = prepared(found.schema)
    assert not again.left_out and [text for text in others if takes(found.schema, text)] == []


# a schema, and the path of the keyword that is left out
LEFT_OUT: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"tags": {"type": "array", "uniqueItems": True}}}, "properties.tags.uniqueItems"),
    ({"not": {"const": 1}}, "not"),
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
    ({"contains": NUMBER, "minContains": 2}, "contains"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"anyOf": [STRING, {"pattern": "^(?=a)b"}]}, "anyOf.1.pattern"),
    ({"pattern": r"(a)\1"}, "pattern"),
    ({"pattern": r"\bword\b"}, "pattern"),
    ({"pattern": "a\\x01"}, "pattern"),
    ({"patternProperties": {"^(?!a)": NUMBER}}, "patternProperties.^(?!a)"),
    ({"const": "a\x00b"}, "const"),
    ({"enum": [2**60 + 1]}, "enum"),
    ({"$defs": {"A": {"items": {"contains": NUMBER}}}, "items": ref("A")}, "$defs.A.items.contains"),
    ({"oneOf": [NUMBER, {"type": "integer"}]}, "oneOf"),
    ({"oneOf": [kind("a"), {"type": "object", "properties": {"b": {}}}]}, "oneOf"),
    ({"properties": {"u": {"oneOf": [ref("A"), ref("A")]}}, "$defs": {"A": NUMBER}}, "properties.u.oneOf"),
    ({"$ref": "https://e.org/other"}, "$ref"),
    ({"minProperties": 2, "type": "object"}, "minProperties"),
    ({"maxProperties": 1, "properties": {"a": {}, "b": {}, "c": {}}, "additionalProperties": NUMBER}, "maxProperties"),
    ({"propertyNames": {"type": "number"}}, "propertyNames"),
    ({"propertyNames": {"pattern": "^(?=a)"}}, "propertyNames.pattern"),
    ({"unevaluatedProperties": False, "anyOf": [kind("a"), kind("b")]}, "unevaluatedProperties"),
    ({"properties": {"a": {"type": "string", "required": True}}}, "properties.a.required"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "path"), LEFT_OUT)
def test_what_is_left_out_is_named(schema: dict[str, Any], path: str) -> None:
    found = prepared(schema)
    assert path in found.left_out and all(found.left_out.values())
    with pytest.raises(RequestError, match=re.escape(path)):
        compiled(schema)
    assert not prepared(found.schema).left_out
    compiled(found.schema)


def test_unknown_formats_and_keywords_are_annotations() -> None:
    schema = {
        "properties": {
            "a": {"type": "string", "format": "color"},
            "b": {"type": "string", "format": "date"},
        },
        "unit": 1,
    }
    found = prepared(schema)
    assert not found.left_out and set(found.annotations) == {"properties.a.format", "unit"}
    assert takes(schema, '{"a":"x","b":"2026-01-31"}') and not takes(schema, '{"b":"x"}')


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"type": "objec"}, "type must be one of .*'objec'"),
    ({"properties": 3}, "properties must be an object"),
    ({"properties": {"a": 3}}, "properties.a must be a schema"),
    ({"properties": {"a": {"minLength": -1}}}, "properties.a.minLength must be an integer"),
    ({"maxItems": 1.5}, "maxItems must be an integer"),
    ({"minimum": "1"}, "minimum must be a number"),
    ({"multipleOf": 0}, "multipleOf must be larger than 0"),
    ({"required": "a"}, "required must be a list"),
    ({"enum": 3}, "enum must be a list"),
    ({"anyOf": {}}, "anyOf must be a list"),
    ({"pattern": 3}, "pattern must be a regular"),
    ({"$ref": "#/$defs/none"}, "leads nowhere"),
    ({"$ref": 3}, "ref must be a string"),
    ({"$ref": "#/$defs/a", "$defs": {"a": ref("b"), "b": ref("a")}}, "leads to itself"),
    ({"properties": {f"p{number}": {} for number in range(491)}}, "491 properties that may be left out"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "message"), WRONG)
def test_what_is_no_schema_is_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongSchemaError, match=message):
        prepared(schema)


@pytest.mark.parametrize("pattern", PLAIN_PATTERNS)
def test_plain_patterns_are_equal_to_those_with_look_around(pattern: str) -> None:
    chance, matches = random.Random(1), 0
    for _ in range(20_000):
        text = "".join(chance.choice("aZ0_'+-.@") for _ in range(chance.randint(0, 6)))
        text += chance.choice(("@a.bc", "@a-b.c.de", "@.a", ""))
        expected = re.search(pattern, text) is not None
        matches += expected
        assert (re.search(PLAIN_PATTERNS[pattern], text) is not None) == expected, text
    assert matches > 500
