"""Objects with `properties` have no other names, unless the schema says so."""

import json
import time
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from orca_jax.text.grammar import GrammarFactory
from orca_jax.text.schemas.closed import closed as closed_with_unions
from orca_jax.text.schemas.keywords import SchemaTooLargeError
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.text.tools import forced_tools_schema
from orca_jax.values.errors import RequestError
from orca_jax.values.request import StructuredOutput

TOKENIZER = LLTokenizer("byte")
FACTORY = GrammarFactory(ByteTokenizer(), 257, (256,))
INTEGER = {"type": "integer"}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    return closed_with_unions(schema)[0]


def takes(schema: dict[str, Any], text: str) -> bool:
    """True if a grammar of the closed schema accepts the whole text."""
    source = LLMatcher.grammar_from_json_schema(
        json.dumps(closed(schema)), overrides={"whitespace_flexible": False}
    )
    matcher = LLMatcher(TOKENIZER, source)
    assert not matcher.is_error(), matcher.get_error()
    return bool(
        matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
        and matcher.is_accepting()
    )


def props(*names: str, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(names, INTEGER), **fields}


def ref(name: str, **fields: Any) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}", **fields}


DEFS = {"A": props("a"), "B": props("b"), "OPEN": props("o", additionalProperties=True)}

# schema, texts that match, texts that do not
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (props("a"), ["{}", '{"a":1}'], ['{"z":1}', '{"a":1,"z":1}', '{"a":"x"}']),
    ({"properties": {"a": INTEGER}}, ['{"a":1}', "3"], ['{"z":1}']),
    (props(), ["{}"], ['{"z":1}']),
    ({"type": "object"}, ["{}", '{"z":1}'], []),
    (props("a", additionalProperties=True), ['{"a":1,"z":"x"}'], ['{"a":"x"}']),
    (props("a", additionalProperties=INTEGER), ['{"a":1,"z":1}'], ['{"z":"x"}']),
    (props("a", additionalProperties=False), ['{"a":1}'], ['{"z":1}']),
    (props("a", required=["z"]), ['{"a":1,"z":"x"}'], ['{"a":1}', '{"a":1,"z":1,"y":1}']),
    (props("a", patternProperties={"^x": INTEGER}), ['{"a":1,"xy":2}'], ['{"z":1}', '{"xy":"s"}']),
    # nested
    ({"properties": {"p": props("a")}}, ['{"p":{"a":1}}'], ['{"p":{"z":1}}']),
    ({"type": "array", "items": props("a")}, ['[{"a":1}]'], ['[{"z":1}]']),
    ({"type": "array", "prefixItems": [props("a")], "items": False}, ['[{"a":1}]'], ['[{"z":1}]']),
    ({"type": "object", "additionalProperties": props("a")}, ['{"z":{"a":1}}'], ['{"z":{"z":1}}']),
    # names of keywords are ordinary names of properties
    ({"properties": {"properties": props("enum", "allOf")}}, ['{"properties":{"enum":1}}'], ['{"properties":{"z":1}}']),
    # references
    (ref("A", **{"$defs": DEFS}), ['{"a":1}'], ['{"z":1}']),
    ({"properties": {"p": ref("A")}, "$defs": DEFS}, ['{"p":{"a":1}}'], ['{"p":{"z":1}}']),
    ({"properties": {"p": ref("A")}, "definitions": {}, "$defs": DEFS}, ['{"p":{"a":1}}'], ['{"p":{"z":1}}']),
    (
        {"properties": {"a": INTEGER, "more": {"$ref": "#"}}},
        ['{"a":1,"more":{"a":2,"more":{}}}'],
        ['{"more":{"z":1}}', '{"more":{"more":{"z":1}}}'],
    ),
    # choices
    ({"anyOf": [props("a"), props("b"), {"type": "null"}]}, ['{"a":1}', '{"b":1}', "null"], ['{"a":1,"b":1}']),
    ({"oneOf": [props("a", required=["a"]), props("b", required=["b"])]}, ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}']),
    (props("a", anyOf=[props("b"), props("c")]), ['{"a":1,"b":1}', '{"a":1,"c":1}'], ['{"b":1,"c":1}', '{"z":1}']),
    (props("a", "b", anyOf=[{"required": ["a"]}, {"required": ["b"]}]), ['{"a":1}', '{"b":1}'], ['{"a":1,"z":1}']),
    # parts that all apply
    ({"allOf": [props("a"), props("b")]}, ['{"a":1,"b":2}', '{"b":2}'], ['{"a":1,"z":1}', '{"a":"x"}', '{"b":"x"}']),
    ({"allOf": [ref("A"), props("c")], "$defs": DEFS}, ['{"a":1,"c":2}'], ['{"a":1,"z":1}', '{"c":"x"}']),
    ({"allOf": [ref("A"), ref("B")], "$defs": DEFS}, ['{"a":1,"b":2}'], ['{"z":1}', '{"a":"x"}']),
    (ref("A", properties={"c": INTEGER}, **{"$defs": DEFS}), ['{"a":1,"c":2}'], ['{"z":1}', '{"a":"x"}']),
    ({"allOf": [ref("A")], "description": "d", "$defs": DEFS}, ['{"a":1}'], ['{"z":1}']),
    (
        {"allOf": [{"anyOf": [props("a"), props("b")]}, {"anyOf": [props("c"), props("d")]}]},
        ['{"a":1,"c":1}', '{"b":1,"d":1}'],
        ['{"a":1,"b":1}', '{"z":1}'],
    ),
    ({"allOf": [ref("OPEN"), props("c")], "$defs": DEFS}, ['{"o":1,"c":1,"z":"x"}'], ['{"c":"x"}']),
    ({"allOf": [props("a", patternProperties={"^x": INTEGER}), props("b")]}, ['{"a":1,"b":1,"xy":1}'], ['{"z":1}']),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_objects_are_closed(number: int) -> None:
    schema, matching, others = CASES[number]
    before = json.dumps(schema)
    for text in matching:
        assert takes(schema, text), text
    for text in others:
        assert not takes(schema, text), text
    assert json.dumps(schema) == before, "the caller's schema stays as it is"


def test_answers_of_a_schema_end() -> None:
    """The text may end after the listed names: a comma may not follow."""
    schema = props("a", required=["a"])
    constraint = FACTORY.compile(StructuredOutput("json_schema", json.dumps(schema)))
    for token in b'{"a":1':
        assert constraint.allowed() >> token & 1
        constraint.accept(token)
    allowed = [chr(token) for token in range(256) if constraint.allowed() >> token & 1]
    assert "}" in allowed and "," not in allowed


@pytest.mark.parametrize("strict", [True, False, None])
def test_parameters_of_tools_are_closed(strict: bool | None) -> None:
    parameters = {
        **props("a"),
        "$defs": {"P": props("x")},
        "properties": {"a": INTEGER, "default": ref("P")},
    }
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": parameters, "strict": strict},
    }
    schema = json.loads(forced_tools_schema([tool], "required"))
    assert takes(schema, '[{"name":"f","arguments":{"a":1,"default":{"x":1}}}]')
    assert not takes(schema, '[{"name":"f","arguments":{"z":1}}]')
    assert not takes(schema, '[{"name":"f","arguments":{"default":{"z":1}}}]')
    named = json.loads(forced_tools_schema([tool], {"type": "function", "function": {"name": "f"}}))
    assert takes(named, '{"a":1}') and not takes(named, '{"z":1}')


def test_malformed_schemas_are_left_to_the_compiler() -> None:
    for schema in (
        {"properties": 3},
        {"allOf": {}},
        {"anyOf": [3]},
        {"$ref": 5},
        {"required": "a", "properties": {}},
    ):
        assert closed(schema).keys() >= schema.keys()
    with pytest.raises(RequestError, match="cannot be used: properties must be an object"):
        FACTORY.compile(StructuredOutput("json_schema", '{"properties": 3}'))


def chain(length: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"a{n}": {"allOf": [ref(f"a{n + 1}"), props(f"p{n}")]} for n in range(length)
    }
    return ref("a0", **{"$defs": {**definitions, f"a{length}": props("last")}})


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"anyOf": [props(f"{n}-{m}") for m in range(3)]} for n in range(500)]},
        chain(1500),
        chain(300),
        {
            "allOf": [ref("a"), ref("b")],
            "$defs": {"a": {"allOf": [ref("b"), props("x")]}, "b": {"allOf": [ref("a")] * 9}},
        },
    ],
)
def test_bombs_of_names_do_not_go_off(schema: dict[str, Any]) -> None:
    start = time.process_time()
    try:
        assert len(json.dumps(closed(schema))) < 10**7
    except SchemaTooLargeError as error:
        assert "its parts" in str(error)
    assert time.process_time() - start < 5
