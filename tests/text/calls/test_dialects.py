"""Tool calls: found in all divisions into pieces, without loss of text, with bounded work per character."""

import json
from collections.abc import Sequence
from functools import partial
from typing import get_args, get_type_hints

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orca_jax.server_config import ServerConfig
from orca_jax.text.calls.dialects import (
    BY_NAME,
    DIALECTS,
    StreamedArguments,
    required_parser,
    tool_parser,
)
from orca_jax.text.calls.parts import ToolCall, ToolParser
from orca_jax.values.errors import ConfigError
from tests.text.tool_calls import TOOLS, A, B, F, parse

called = partial(ToolCall, F)  # of the first tool, perhaps with broken arguments
TAGGED = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
DEEP = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
MINIMAX = '<minimax:tool_call>\n<invoke name="f">'
TABLE = [
    ("hermes", "no call, a < b and <tool_ca", ["no call, a < b and <tool_ca"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', [A]),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {}, "name": "get-weather_2"}\n</tool_call>\nDone.',
        ["Let me see.\n", A, B, "\nDone."],
    ),
    # the text ends early: from the name on, it is a call
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}', [A]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool', [A]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}', [A]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x', [called('{"x')]),
    ("hermes", '<tool_call>{"name": "f", "argum', [called("")]),
    ("hermes", '<tool_call>{"name": "f', ...),
    ("hermes", '<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call>', ...),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', ...),
    ("hermes", '<tool_call>{"arguments": {"x": 1}}</tool_call>', ...),
    ("hermes", '<tool_call>{"thought": "lost?", "name": "f", "arguments": {}}</tool_call>', ...),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}, "thought": "?"}</tool_call>', [A]),
    (
        "hermes",
        '<tool_call>{"id": "1", "type": "function", "name": "f", "arguments": {"x": 1}}</tool_call>',
        [A],
    ),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', [called("{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [called("{}")]),
    # and also if its JSON breaks
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', [called("[1]")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        [called('{"x": NaN}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 01}}</tool_call>',
        [called('{"x": 01}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1</tool_call> Done',
        [called('{"x": 1'), " Done"],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1 < 2 </tool',
        [called('{"x": 1 < 2 </tool')],
    ),
    ("hermes", '<tool_call>{"arguments": {"x": 1</tool_call>', ...),
    ("hermes", "<tool_call>" + '{"a":' * 100_000 + "1" + "}" * 100_000 + "</tool_call>", ...),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [A]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>{\\"\\\\"}}</tool_call>',
        [called('{"x": "</tool_call>{\\"\\\\"}')],
    ),
    (
        "hermes",
        '<tool_call><tool_call>{"name": "f", "arguments": {"x": 1}}<tool_call>{"name": "f", "arguments": {"x": 1}}'
        "</tool_call>",
        ["<tool_call>", A, A],
    ),
    ("hermes", "  \n", ["  \n"]),
    ("hermes", "", []),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', [A]),
    ("llama3_json", '\n<|python_tag|>{"name": "f", "parameters": {"x": 1}}\n', [A]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"x": 1}}; {"name": "get-weather_2", "parameters": {}}',
        [A, B],
    ),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}; and so on', [A, "; and so on"]),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}} is a call', [A, " is a call"]),
    ("llama3_json", 'Say {"name": "f", "parameters": {"x": 1}}', ...),
    ("llama3_json", '{"answer": 42}', ...),
    ("llama3_json", "<|python_tag|>print(1)", ...),
    ("llama3_json", "<|pyth", ...),
    ("llama3_json", "<|python is", ...),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}]', [A]),
    (
        "mistral",
        'Well.[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}, "id": "a1b2c3d4e"}, {"name": "get-weather_2", '
        '"arguments": {}}] ',
        ["Well.", A, B],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"na', [A, ', {"na']),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}},', [A, ","]),
    ("mistral", "[TOOL_CALLS] []", ...),
    ("mistral", "[[TOOL_CALLS] [1]", ...),
    (
        "mistral",
        'Well.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]get-weather_2[ARGS]{}',
        ["Well.", A, B],
    ),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"x": 1}', [A]),
    ("mistral", '[TOOL_CALLS]f{"x": 1}', [A]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x', [called('{"x')]),
    ("mistral", "[TOOL_CALLS]f[AR", [called("")]),
    ("mistral", "[TOOL_CALLS]g[ARGS]{}", ...),
    ("mistral", "[TOOL_CALLS]f and so on {}", ...),
    ("mistral", "[TOOL_CALLS]f", ...),
    ("qwen3_coder", TAGGED, [A]),
    (
        "qwen3_coder",
        "Look.\n" + TAGGED.replace("<tool_call>\n", "").replace("\n</tool_call>", ""),
        ["Look.\n", A],
    ),
    (
        "qwen3_coder",
        TAGGED + "\n<tool_call>\n<function=get-weather_2>\n</function>\n</tool_call>\nDone.",
        [A, B, "\nDone."],
    ),
    ("qwen3_coder", TAGGED.replace("1", "a\n\n<b> "), [called('{"x": "a\\n\\n<b> "}')]),
    ("qwen3_coder", TAGGED.replace("1", "True"), [called('{"x": true}')]),
    ("qwen3_coder", TAGGED.replace("\n</function>", "<b></function>"), [A]),
    ("qwen3_coder", TAGGED.replace("</function>\n", "") + "!", [A, "!"]),
    ("qwen3_coder", TAGGED[: TAGGED.index("1")], [called("{")]),
    ("qwen3_coder", TAGGED[: TAGGED.index("</func")], [called('{"x": 1')]),
    ("qwen3_coder", TAGGED.replace("=f", "=g"), ...),
    ("qwen3_coder", "<tool_call>\n<func", ...),
    ("qwen3_coder", "<tool_call>\n<functions", ...),
    ("pythonic", "[f(x=1)]", [A]),
    ("pythonic", "[f(x=1), get-weather_2()]", [A, B]),
    ("pythonic", "<|python_start|>[f(x=1)]<|python_end|>", [A]),
    (
        "pythonic",
        "[f(x='it\\'s [1, \"2\"]', y=(True, {'a': None}))]",
        [called("""{"x": "it's [1, \\"2\\"]", "y": [true, {"a": null}]}""")],
    ),
    ("pythonic", "[f(x=New York, y=nan)]", [called('{"x": "New York", "y": "nan"}')]),
    ("pythonic", "[f(x=1), ", [A, ", "]),
    ("pythonic", "[f(x=1, y='a", [called('{"x": 1')]),
    ("pythonic", "[f(1, x=1)]", [called('{1, "x": 1}')]),
    ("pythonic", "[g(x=1)]", ...),
    ("pythonic", "[1, 2]", ...),
    ("pythonic", "I call [f(x=1)]", ...),
    (
        "lfm2",
        "Well.<|tool_call_start|>[f(x=1), get-weather_2()]<|tool_call_end|>Done.",
        ["Well.", A, B, "Done."],
    ),
    ("lfm2", "<|tool_call_start|>[f(x=1)]", [A]),
    ("deepseek_v3", DEEP + '{"x": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', [A]),
    ("deepseek_v3", DEEP + '{"x": 1}\n```<｜tool▁call▁end｜>', [A]),
    ("deepseek_v3", DEEP + '{"x": 1}\n```', [A]),
    ("deepseek_v3", DEEP + '{"x', [called('{"x')]),
    ("deepseek_v3", DEEP.replace("｜>f\n", "｜>g\n") + '{"x": 1}', ...),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f and so on", ...),
    ("kimi_k2", KIMI + '{"x": 1}<|tool_call_end|><|tool_calls_section_end|>', [A]),
    ("kimi_k2", KIMI + '{"x": 1}<|tool_call_end|>', [A]),
    ("kimi_k2", KIMI.replace("functions.f", "g") + '{"x": 1}', ...),
    (
        "seed_oss",
        "<seed:tool_call><function=f><parameter=x>1</parameter></function></seed:tool_call>.",
        [A, "."],
    ),
    ("seed_oss", "<seed:tool_call><function=g>", ...),
    ("minimax_m2", MINIMAX + '<parameter name="x">1</parameter></invoke></minimax:tool_call>', [A]),
    ("minimax_m2", MINIMAX + '<parameter name="x', [called("{")]),
    ("minimax_m2", MINIMAX.replace("f", "g") + "</invoke>", ...),
    ("granite", 'Well.<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]', ["Well.", A]),
    ("granite", "<|tool_call|>[]", ...),
    ("nemotron_json", '<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}] </TOOLCALL>', [A]),
    (
        "cohere_command3",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}]',
        [A],
    ),
    ("olmo3", "<function_calls>f(x=1)\nget-weather_2()</function_calls>", [A, B]),
    ("olmo3", "<function_calls>f(x=1)\nand so on", [A, "\nand so on"]),
    (
        "glm45",
        "Well.<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        ["Well.", A],
    ),
    (
        "glm45",
        "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><tool_call>get-weather_2</tool_call>",
        [A, B],
    ),
    ("glm45", "<tool_call>f<arg_key>x</arg_key><arg_value>1", [called("{")]),
    ("glm45", "<tool_call>g<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>", ...),
    (
        "gemma4",
        "Well.<|tool_call>call:f{x:1}<tool_call|><|tool_call>call:get-weather_2{}<tool_call|>",
        ["Well.", A, B],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{x:<|"|>a, "b} <|<|"|>}<tool_call|>',
        [called('{"x": "a, \\"b} <|"}')],
    ),
    ("gemma4", "<|tool_call>call:f{x:{y:[1,None],z:<|", [called("{")]),
    ("gemma4", "<|tool_call>call:f{x:New York}", [called('{"x": "New York"}')]),
    ("gemma4", "<|tool_call>call:g{x:1}<tool_call|>", ...),
    ("functiongemma", "<start_function_call>call:f{x:1}<end_function_call>Done.", [A, "Done."]),
    ("openai", "<|channel|>final<|message|>1 < 2<|return|>", ["1 < 2"]),
    (
        "openai",
        "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant<|channel|>final<|message|>Done",
        ["Done"],
    ),
    (
        "openai",
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>',
        [A],
    ),
    ("openai", ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}', [A]),
    ("openai", "<|channel|>commentary to=functions.get-weather_2<|message|><|call|>", [B]),
    ("openai", "<|channel|>commentary to=functions.g<|message|>{}<|call|>", ["{}"]),
    ("openai", "<|channel|>final<|mess", []),
    ("openai", "1 < 2 <|", ...),
    ("openai", "to", ...),
]


@pytest.mark.parametrize(
    ("dialect", "text", "expected"), TABLE, ids=[f"{d}-{n}" for n, (d, _, _) in enumerate(TABLE)]
)
def test_table(dialect: str, text: str, expected: list[str | ToolCall]) -> None:
    wanted = [text] if expected is ... else expected
    steps = (len(text) + 1, 1, 7) if len(text) < 1000 else (len(text) + 1, 1000)
    for step in steps:
        assert parse(tool_parser(dialect, TOOLS), text, range(0, len(text), step)) == wanted


fragments = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "[TOOL_CALLS]",
            "<|python_tag|>",
            "[",
            "]",
            ",",
            ";",
            " ",
            "\n",
            "<",
            "[TOOL",
        ),
        *(
            '{"name": "f", "arguments": {"x": 1}}',
            '{"name": "f", "parameters": {}}',
            '{"name": "h", "arguments": {}}',
        ),
        *(
            '{"',
            '"',
            "\\",
            "{",
            "}",
            "word",
            "é🙂",
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<|tool_call>call:f{",
            '<|"|>',
            DEEP,
            KIMI,
        ),
        *(
            "<arg_key>x</arg_key>",
            "<arg_value>",
            "</arg_value>",
            "<|tool_call_start|>",
            "}<tool_call|>",
            "```",
        ),
        *(
            "<function=f>",
            "<parameter=x>",
            "</parameter>",
            "</function>",
            "f[ARGS]",
            "f(",
            "x=",
            "'",
            ")",
            TAGGED,
        ),
    ]
)
texts = st.lists(fragments | st.text(max_size=4), max_size=25).map("".join)
MAKERS = [*DIALECTS, "required", "named"]


def make(kind: str) -> ToolParser:
    if kind in DIALECTS:
        return tool_parser(kind, TOOLS)
    return required_parser(TOOLS) if kind == "required" else StreamedArguments(F)


@settings(deadline=None, max_examples=300)
@given(kind=st.sampled_from(MAKERS), text=texts, cuts=st.lists(st.integers(0, 300), max_size=40))
@example(
    kind="hermes", text='<tool_call>{"name": "f", "arguments": {}}<tool_call>x', cuts=range(60)
)
def test_nothing_is_lost_wherever_the_pieces_end(kind: str, text: str, cuts: Sequence[int]) -> None:
    """The output is the same for all divisions into pieces: the texts in their order, and all text without a call."""
    out = parse(make(kind), text, cuts)
    assert out == parse(make(kind), text)
    at = 0
    for item in out:
        if isinstance(item, str):
            start = text.index(item, at)
            at = start + len(item)
    if not any(isinstance(item, ToolCall) for item in out):
        assert "".join(map(str, out)) == text


@settings(deadline=None, max_examples=100)
@given(
    text=texts,
    before=st.sampled_from(["", "Well. "]),
    cuts=st.lists(st.integers(0, 300), max_size=40),
)
def test_arguments_of_json_pass_as_they_are(text: str, before: str, cuts: Sequence[int]) -> None:
    arguments = json.dumps({"x": text})
    for kind, written in (
        ("hermes", '<tool_call>{"name": "f", "arguments": %s}</tool_call>'),
        ("mistral", '[TOOL_CALLS][{"arguments": %s, "name": "f"}]'),
        ("mistral", "[TOOL_CALLS]f[ARGS]%s"),
    ):
        found = parse(tool_parser(kind, TOOLS), before + written % arguments, cuts)
        assert found == [*([before] if before else []), called(arguments)]


def test_pieces_of_arguments_go_out_as_they_come() -> None:
    parser = tool_parser("hermes", TOOLS)
    assert parser.push('I look. <tool_call>{"name": "f') == ["I look. "]
    assert parser.push('", "arg') == [called("")]
    assert parser.push('uments": {"x": "a') == [ToolCall(None, '{"x": "a')]
    assert parser.push(' b"') == [ToolCall(None, ' b"')]
    assert parser.push("}}</tool_call> bye") == [ToolCall(None, "}"), " bye"]
    tagged = tool_parser("qwen3_coder", TOOLS)
    assert tagged.push("<tool_call><function=f>") == [called("{")]
    assert tagged.push("<parameter=x>\n1\n</parameter>\n<parameter=y>") == [
        ToolCall(None, '"x": 1')
    ]
    assert tagged.push("a</parameter></function>") == [ToolCall(None, ', "y": "a"}')]


def test_text_is_not_held_longer_than_it_has_to_be() -> None:
    parser = tool_parser("hermes", TOOLS)
    assert parser.push("Well, 1 <") == ["Well, 1 "]
    assert parser.push(" 2") == ["< 2"]
    assert parser.push("<tool_call>{not") == ["<tool_call>{not"]
    assert parser.push(" a call") == [" a call"]


ADVERSARIAL = [
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>{"',
    "<tool_call>{}",
    "<tool_call><tool_cal",
    "<",
    "[TOOL_CALLS][",
    "[TOOL_CALLS] [{",
    '[TOOL_CALLS] [{"name": "f", "arguments": {}},',
    '{"name": "f", "parameters": {}};',
    "[TOOL_CALLS]f[ARGS]{",
    "<tool_call><function=x>",
    "<function=f><parameter=x>",
    "<function=f><parameter=x>1</parameter></function>",
    "[f(x='",
    "[f(x=1), ",
    "{",
    '{"',
    '"\\',
    " ",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", MAKERS)
def test_a_long_text_of_almost_calls_is_linear_work(kind: str) -> None:
    """A quadratic parser would need hours for these texts."""
    for unit in ADVERSARIAL:
        text = unit * (100_000 // len(unit))
        for step in (len(text), 5000):
            parser = make(kind)
            pieces = [
                item
                for start in range(0, len(text), step)
                for item in parser.push(text[start : start + step])
            ]
            size = sum(len(item) for item in [*pieces, *parser.finish()] if isinstance(item, str))
            assert size <= len(text), unit


def test_no_such_parser() -> None:
    with pytest.raises(ConfigError, match="hermes, llama3_json, llama4_json, mistral"):
        tool_parser("xml", TOOLS)


def test_the_flag_takes_all_names() -> None:
    kind = get_type_hints(ServerConfig)["tool_call_parser"]
    assert set(get_args(get_args(kind)[0])) == set(BY_NAME)


def test_other_names_of_the_same_forms() -> None:
    names = [name for row in DIALECTS.values() for name in (row.name, *row.aliases)]
    assert sorted(names) == sorted(BY_NAME), "no name stands for two"
    assert parse(tool_parser("llama4_pythonic", TOOLS), "[f(x=1)]") == [A]
