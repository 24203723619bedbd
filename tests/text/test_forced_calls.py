"""Forced calls and the schemas that force them, and checks of the tools of a request."""

import json
from typing import Any

import pytest
from llguidance import JsonCompiler, LLMatcher, LLTokenizer

from orca_jax.text.tools import ToolCall, check_tools, forced_parser, forced_tools_schema
from orca_jax.values.errors import RequestError
from tests.text.tool_calls import NAMED, TOOLS, A, B, F, parse


def begun(arguments: str) -> ToolCall:
    return ToolCall(F, arguments)


FORCED = [
    (
        "required",
        '[{"name": "f", "arguments": {"x": 1}}, {"name": "get-weather_2", "arguments": {}}]',
        [A, B],
    ),
    ("required", ' [ {"name":"f","arguments":{"x": 1}} ] ', [A]),
    ("required", '[{"name": "f", "arguments": {"x": 1}}, {"name": "f", "argum', [A, begun("")]),
    ("required", '[{"name": "f", "argum', [begun("")]),
    ("required", '[{"name": "f"', [begun("")]),
    ("required", '[{"name": "f", "arguments": {"x": "a ', [begun('{"x": "a ')]),
    ("required", '[{"name": "f", "arguments": {"x": 1}', [begun('{"x": 1}')]),
    ("required", '[{"name": "get-weather', ...),
    ("required", "[", ...),
    (NAMED, '{"x": 1}', [A]),
    (NAMED, '{"x": 1', [begun('{"x": 1')]),
    (NAMED, "{", [begun("{")]),
    (NAMED, "", []),
]


@pytest.mark.parametrize(("choice", "text", "expected"), FORCED)
def test_forced_calls(choice: Any, text: str, expected: list[str | ToolCall]) -> None:
    for step in (1, 5, 100):
        cuts = range(0, len(text), step)
        assert parse(forced_parser(TOOLS, choice), text, cuts) == (
            [text] if expected is ... else expected
        )


POINT = {
    "type": "object",
    "properties": {
        "at": {"$ref": "#/$defs/P"},
        "more": {"type": "array", "items": {"$ref": "#/$defs/P"}},
    },
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {
        "P": {
            "type": "object",
            "properties": {"x": {"type": "integer"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
DRAW = {"type": "function", "function": {"name": "draw", "parameters": POINT}}
CLEAR = {"type": "function", "function": {"name": "clear"}}


def takes(schema: str, text: str) -> bool:
    """True if a grammar of the schema accepts the whole text."""
    matcher = LLMatcher(LLTokenizer("byte"), JsonCompiler().compile(schema))
    return bool(
        matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
        and matcher.is_accepting()
    )


def test_forced_schema_says_what_the_parser_reads() -> None:
    many, one = (
        forced_tools_schema([DRAW, CLEAR], "required", parallel) for parallel in (True, False)
    )
    draw = '{"name": "draw", "arguments": {"at": {"x": 1}, "more": [{"x": 2}]}}'
    clear = '{"name": "clear", "arguments": {}}'
    assert (
        takes(many, f"[{draw}]") and takes(many, f"[{draw}, {clear}]") and takes(one, f"[{clear}]")
    )
    assert not takes(one, f"[{draw}, {clear}]")
    for wrong in (
        "[]",
        draw,
        f"[{draw.replace('1', 'true')}]",
        '[{"name": "clear", "arguments": {"x": 1}}]',
    ):
        assert not takes(many, wrong), wrong
    names = [
        item.name
        for item in parse(forced_parser([DRAW, CLEAR], "required"), f"[{draw}, {clear}]")
        if isinstance(item, ToolCall)
    ]
    assert names == ["draw", "clear"]
    named = forced_tools_schema([DRAW, CLEAR], {"type": "function", "function": {"name": "draw"}})
    assert json.loads(named) == POINT
    assert takes(named, '{"at": {"x": 1}}') and not takes(named, "{}")


def test_references_into_two_schemas_do_not_meet() -> None:
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"v": {"$ref": "#/$defs/V"}, "$ref": {"enum": ["#"]}},
                    "required": ["v"],
                    "$defs": {"V": {"type": kind}},
                },
            },
        }
        for name, kind in (("i", "integer"), ("s", "string"))
    ]
    schema = forced_tools_schema(tools, "required")
    assert takes(schema, '[{"name": "i", "arguments": {"v": 1}}]')
    assert takes(schema, '[{"name": "s", "arguments": {"v": "a", "$ref": "#"}}]')
    assert not takes(schema, '[{"name": "s", "arguments": {"v": 1}}]')


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("auto", "must be"),
        ({"function": {"name": "h"}}, "'h', which is not one of"),
        ({"function": 1}, "must be"),
        ({}, "must be"),
    ],
)
def test_choices_that_force_nothing(choice: Any, words: str) -> None:
    for use in (forced_tools_schema, forced_parser):
        with pytest.raises(RequestError, match=words) as caught:
            use(TOOLS, choice)
        assert caught.value.param == "tool_choice"


def tool(**function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", **function}}


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "not": schema}
    return schema


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([], "1 to 128"),
        ([tool()] * 129, "1 to 128"),
        ([{}], r"tools\[0\] must be"),
        ([tool(), {"type": "custom", "function": {"name": "g"}}], r"tools\[1\] must be"),
        ([tool(name="")], "1 to 128 letters"),
        ([tool(name="a" * 129)], "1 to 128 letters"),
        ([tool(name="a b")], "1 to 128 letters"),
        ([tool(name="f\n")], "1 to 128 letters"),
        ([tool(name=None)], "1 to 128 letters"),
        ([tool(), tool()], "f is used twice"),
        ([tool(parameters=[])], "must be a JSON schema"),
        ([tool(parameters={"type": "string"})], "must be a JSON schema"),
        ([tool(parameters=nested(64))], "64 levels deep"),
    ],
)
def test_tools_that_cannot_be_meant(tools: list[dict[str, object]], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        check_tools(tools)
    assert caught.value.param == "tools"


def test_tools_that_can() -> None:
    check_tools(
        [
            DRAW,
            CLEAR,
            tool(parameters=nested(60), description="d", strict=True),
            tool(name="a-B_9" * 12),
        ]
    )
    check_tools([tool(name=f"f{number}") for number in range(128)])
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"not": deep}
    with pytest.raises(RequestError, match="64 levels deep"):
        check_tools([tool(parameters=deep)])
