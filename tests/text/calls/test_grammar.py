"""Grammars of calls that a model makes by its own choice: beside a format, and with strict arguments."""

from collections.abc import Mapping
from typing import Any

import pytest

from orca_jax.text.calls.dialects import DIALECTS, HARMONY, tool_parser
from orca_jax.text.calls.forms import CannotEnforceError, Offer
from orca_jax.text.calls.parts import ToolCall
from orca_jax.text.grammar import GrammarFactory
from orca_jax.text.reasoning import TAGS, thinking_first
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.text.tools import prepared_tool
from orca_jax.values.errors import RequestError
from orca_jax.values.request import StructuredOutput
from tests.text.accepting import WithTokens, accepts
from tests.text.tool_calls import parse

STRICT = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/City"},
        "days": {"type": "integer"},
        "note": {"type": "string"},
    },
    "required": ["city"],
    "$defs": {"City": {"enum": ["Oslo", "Rome"]}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": STRICT}},
    {
        "type": "function",
        "function": {"name": "clock", "parameters": {"properties": {"zone": {"type": "integer"}}}},
    },
]
FORMAT = StructuredOutput(
    "json_schema", '{"properties": {"x": {"type": "integer"}}, "required": ["x"]}'
)
# For each form: a call of `weather` with arguments as JSON text, then one of `clock`; and the text of a wrong call.
JSON = {"a": '{"city":"Oslo","days":2}', "b": '{"zone":"any"}'}
CALLS: dict[str, tuple[str, str, list[str]]] = {
    "hermes": (
        '<tool_call>\n{"name":"weather","arguments":{"city":"Oslo","days":2}}\n</tool_call>',
        '<tool_call>{"name":"clock","arguments":{"zone":"any"}}</tool_call>',
        ['<tool_call>{"name":"weather","arguments":{"city":"Bonn', '<tool_call>{"name":"unknown'],
    ),
    "llama3_json": (
        '{"name":"weather","parameters":{"city":"Oslo","days":2}}',
        '; {"name":"clock","parameters":{"zone":"any"}}',
        ['{"name":"weather","parameters":{"city":"Bonn', '{"name":"unknown', '{"y'],
    ),
    "mistral": (
        '[TOOL_CALLS]weather[ARGS]{"city":"Oslo","days":2}',
        '[TOOL_CALLS]clock[ARGS]{"zone":"any"}',
        [
            '[TOOL_CALLS]weather[ARGS]{"city":"Bonn',
            '[TOOL_CALLS] [{"name":"weather","arguments":{"city":"Bonn',
        ],
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "\n<tool_call>\n<function=clock>\n<parameter=zone>\nany\n</parameter>\n</function>\n</tool_call>",
        [
            "<tool_call>\n<function=weather>\n<parameter=city>\nBonn",
            "<function=weather>\n</function>",
        ],
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>",
        "\n<seed:tool_call>\n<function=clock>\n<parameter=zone>any</parameter>\n</function>\n</seed:tool_call>",
        [
            "<seed:tool_call>\n<function=weather>\n<parameter=city>Bonn",
            "<seed:tool_call>\n<function=unknown",
        ],
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n<parameter name="days">'
        "2</parameter>\n</invoke>\n</minimax:tool_call>",
        '\n<minimax:tool_call><invoke name="clock"><parameter name="zone">any</parameter></invoke></minimax:tool_call>',
        [
            '<minimax:tool_call><invoke name="weather"><parameter name="city">Bonn',
            "<minimax:tool_call>weather",
        ],
    ),
    "granite": (
        '<|tool_call|>[{"name":"weather","arguments":{"city":"Oslo","days":2}}]',
        '<|tool_call|>[{"name":"clock","arguments":{"zone":"any"}}]',
        [
            '<|tool_call|>[{"name":"weather","arguments":{"city":"Bonn',
            '<|tool_call|>[{"name":"unknown',
        ],
    ),
    "nemotron_json": (
        '<TOOLCALL>[{"name":"weather","arguments":{"city":"Oslo","days":2}}]</TOOLCALL>',
        '<TOOLCALL>[{"name":"clock","arguments":{"zone":"any"}}]</TOOLCALL>',
        ['<TOOLCALL>[{"name":"weather","arguments":{"city":"Bonn', "<TOOLCALL>[]"],
    ),
    "hunyuan_a13b": (
        '<tool_calls>[{"name":"weather","arguments":{"city":"Oslo","days":2}}]</tool_calls>',
        '<tool_calls>[{"name":"clock","arguments":{"zone":"any"}}]</tool_calls>',
        ['<tool_calls>[{"name":"weather","arguments":{"city":"Bonn', "<tool_calls>[]"],
    ),
    "cohere_command3": (
        '<|START_ACTION|>[{"tool_call_id":"0","tool_name":"weather","parameters":{"city":"Oslo","days":2}}]'
        "<|END_ACTION|>",
        '<|START_ACTION|>[{"tool_name":"clock","parameters":{"zone":"any"}}]<|END_ACTION|>',
        [
            '<|START_ACTION|>[{"tool_name":"weather","parameters":{"city":"Bonn',
            '<|START_ACTION|>[{"name',
        ],
    ),
    "olmo3": (
        '<function_calls>weather(city="Oslo", days=2)</function_calls>',
        '<function_calls>clock(zone="any")</function_calls>',
        ['<function_calls>weather(city="Bonn', "<function_calls>unknown("],
    ),
    "pythonic": (
        '[weather(city="Oslo", days=2)',
        ', clock(zone="any")]',
        ['[weather(city="Bonn', "[weather()]", "[unknown("],
    ),
    "lfm2": (
        '<|tool_call_start|>[weather(city="Oslo", days=2)]<|tool_call_end|>',
        '<|tool_call_start|>[clock(zone="any")]<|tool_call_end|>',
        ['<|tool_call_start|>[weather(city="Bonn', "<|tool_call_start|>[unknown("],
    ),
    "deepseek_v3": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city":"Oslo","days":2}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{"zone":"any"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city":"Bonn',
            "<｜tool▁calls▁begin｜>weather",
        ],
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city":"Oslo","days":2}<|tool_call_end|><|tool_calls_section_end|>',
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>"
        '{"zone":"any"}<|tool_call_end|><|tool_calls_section_end|>',
        ["<|tool_calls_section_begin|><|tool_call_begin|>functions.unknown"],
    ),
    "glm45": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        "<tool_call>clock<arg_key>zone</arg_key><arg_value>any</arg_value></tool_call>",
        [
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Bonn",
            "<tool_call>weather</tool_call>",
        ],
    ),
    "gemma4": (
        '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|>',
        '<|tool_call>call:clock{zone:<|"|>any<|"|>}<tool_call|>',
        ["<|tool_call>call:unknown"],
    ),
    "functiongemma": (
        "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:2}<end_function_call>",
        "<start_function_call>call:clock{zone:<escape>any<escape>}<end_function_call>",
        ["<start_function_call>call:unknown"],
    ),
}
LOOSE = ("gemma4", "functiongemma")  # strict arguments are not enforced


def tools_of(name: str) -> list[dict[str, Any]]:
    return [
        {
            **tool,
            "function": {
                **tool["function"],
                "strict": name not in LOOSE and "strict" in tool["function"],
            },
        }
        for tool in TOOLS
    ]


def text_with_calls(
    name: str, tools: Any, specials: Mapping[str, int], *, parallel: bool
) -> StructuredOutput:
    return DIALECTS[name].calls.constraint(Offer(tools, specials, parallel), None)


def calls_or_format(
    name: str,
    tools: Any,
    answer: StructuredOutput,
    specials: Mapping[str, int],
    *,
    parallel: bool,
) -> StructuredOutput:
    return DIALECTS[name].calls.constraint(Offer(tools, specials, parallel), answer)


def read(name: str, text: str) -> list[tuple[str | None, Any]]:
    return [
        (one.name, one.arguments)
        for one in parse(tool_parser(name, TOOLS), text)
        if isinstance(one, ToolCall)
    ]


def test_every_form_has_a_grammar() -> None:
    assert {*CALLS, HARMONY.name} == set(DIALECTS)


@pytest.mark.parametrize("is_free", [False, True])
def test_messages_of_gpt_oss(is_free: bool) -> None:
    form = (
        text_with_calls(HARMONY.name, TOOLS, {}, parallel=True)
        if is_free
        else calls_or_format(HARMONY.name, TOOLS, FORMAT, {}, parallel=True)
    )
    thought, final = (
        "<|channel|>analysis<|message|>1 < 2<|end|><|start|>assistant",
        "<|channel|>final<|message|>",
    )
    head, tokenizer = (
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        ByteTokenizer(),
    )
    for text in (
        f'{final}{{"x":1}}',
        f'{thought}{final}{{"x":1}}',
        head + JSON["a"],
        f"{thought}{head}{JSON['a']}<|call|>",
    ):
        assert accepts(form, text, tokenizer), text
    assert accepts(form, final + "Well.", tokenizer) == is_free
    for text in (head + '{"city":"Bonn', "Well.", head.replace("weather", "other")):
        assert not accepts(form, text, tokenizer), text


@pytest.mark.parametrize("name", CALLS)
def test_an_answer_is_calls_or_the_format(name: str) -> None:
    first, second, wrong = CALLS[name]
    alone = first + "]" if name == "pythonic" else first
    form = calls_or_format(name, tools_of(name), FORMAT, {}, parallel=True)
    tokenizer = ByteTokenizer()
    for text in ('{"x":1}', alone, first + second):
        assert accepts(form, text, tokenizer), text
    for text in ("Well.", '{"x":"a', "", *wrong):
        assert not accepts(form, text, tokenizer), text
    one = calls_or_format(name, tools_of(name), FORMAT, {}, parallel=False)
    assert accepts(one, alone, tokenizer) and not accepts(one, first + second, tokenizer)
    assert [call[0] for call in read(name, first + second)] == ["weather", "clock"], (
        "the parser reads what it allows"
    )


@pytest.mark.parametrize("name", CALLS)
def test_after_the_marker_of_a_call_strict_arguments_are_enforced(name: str) -> None:
    first, second, wrong = CALLS[name]
    alone = first + "]" if name == "pythonic" else first
    before = "" if name in ("llama3_json", "pythonic") else "Well, 1 < 2 [ { "
    form = text_with_calls(name, tools_of(name), {}, parallel=True)
    tokenizer = ByteTokenizer()
    for text in ("Well, 1 < 2 and so on.", "", before + alone, before + first + second):
        assert accepts(form, text, tokenizer), text
    for text in wrong:
        assert not accepts(form, before + text, tokenizer), text


@pytest.mark.parametrize("name", LOOSE)
def test_some_forms_cannot_be_strict(name: str) -> None:
    with pytest.raises(CannotEnforceError):
        text_with_calls(name, TOOLS, {}, parallel=True)


def test_optional_members() -> None:
    tokenizer = ByteTokenizer()
    python = text_with_calls("pythonic", TOOLS, {}, parallel=True)
    for inner, fits in (
        ('city="Rome"', True),
        ('city="Rome", note="a\\"b"', True),
        ('city="Rome", days=1, note=""', True),
        ("days=1", False),
        ('city="Rome", days="1"', False),
    ):
        assert accepts(python, f"[weather({inner})]", tokenizer) == fits, inner
    tagged = text_with_calls("qwen3_coder", TOOLS, {}, parallel=True)
    for keys, fits in (
        (("city",), True),
        (("city", "note"), True),
        (("note",), False),
        (("city", "other"), False),
    ):
        members = "".join(f"<parameter={key}>\nRome\n</parameter>\n" for key in keys)
        assert accepts(tagged, f"<function=weather>\n{members}</function>", tokenizer) == fits, keys


SPECIALS: list[tuple[str, Mapping[int, str]]] = [
    ("hermes", {257: "<tool_call>", 258: "</tool_call>"}),
    ("mistral", {257: "[TOOL_CALLS]", 258: "[ARGS]"}),
]


@pytest.mark.parametrize(("name", "tokens"), SPECIALS)
def test_markers_may_be_special_tokens(name: str, tokens: Mapping[int, str]) -> None:
    ids = {text: token_id for token_id, text in tokens.items()}
    tokenizer = WithTokens(tokens)

    def encoded(text: str) -> list[int]:
        for one, token_id in ids.items():
            text = text.replace(one, chr(0xE000 + token_id))
        return [i for c in text for i in ([ord(c) - 0xE000] if ord(c) > 0xE000 else c.encode())]

    first, second, (wrong, *_) = CALLS[name]
    for form in (
        text_with_calls(name, TOOLS, ids, parallel=True),
        calls_or_format(name, TOOLS, FORMAT, ids, parallel=True),
    ):
        assert accepts(form, encoded(first + second), tokenizer) and not accepts(
            form, encoded(wrong), tokenizer
        )
    form = text_with_calls(name, TOOLS, ids, parallel=True)
    assert accepts(form, encoded("Well. " + first + " Well."), tokenizer)


def test_reasoning_comes_before_either() -> None:
    form = thinking_first(
        calls_or_format("hermes", TOOLS, FORMAT, {}, parallel=True), TAGS["qwen3"], "free", {}
    )
    tokenizer = ByteTokenizer()
    for text in ('{"x":1}', CALLS["hermes"][0]):
        assert accepts(form, "<think>hm <tool_call></think>" + text, tokenizer) and accepts(
            form, text, tokenizer
        )
    assert not accepts(form, "<think>hm</think>Well.", tokenizer)


def strict(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]


def test_schemas_without_a_grammar_in_tags_or_python() -> None:
    for name, schema in (
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "a+"}}}),
        (
            "qwen3_coder",
            {
                "properties": {
                    "a": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]}
                }
            },
        ),
        ("qwen3_coder", {"properties": {"a b": {"type": "integer"}}}),
        ("qwen3_coder", {"anyOf": [{"properties": {"a": {}}}]}),
        ("pythonic", {"$ref": "#/$defs/A"}),
    ):
        with pytest.raises(CannotEnforceError):
            text_with_calls(name, strict(schema), {}, parallel=True)
    text_with_calls(
        "qwen3_coder",
        strict({"properties": {"a": {"type": ["string", "null"]}}}),
        {},
        parallel=True,
    )


@pytest.mark.parametrize("name", [name for name in CALLS if name not in LOOSE])
def test_long_descriptions_of_strict_tools_are_left_out(name: str) -> None:
    """An agent has dozens of tools, and their texts are longer than what they restrict."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool{number}",
                "strict": True,
                "parameters": {
                    "properties": {"description": {"type": "string", "description": "d" * 4000}},
                    "required": ["description"],
                },
            },
        }
        for number in range(40)
    ]
    form = text_with_calls(name, [prepared_tool(tool)[0] for tool in tools], {}, parallel=True)
    assert len(form.value) < 2**15 and "description" in form.value
    GrammarFactory(ByteTokenizer(), 257, [256]).compile(form)


def test_a_part_has_the_limit_of_a_whole() -> None:
    form = text_with_calls("hermes", strict({"enum": ["p" * 2**21]}), {}, parallel=True)
    with pytest.raises(RequestError, match=r"^json_schema has .* at most 2097152"):
        GrammarFactory(ByteTokenizer(), 257, [256]).compile(form)
