"""Tool calls: found in all divisions into pieces, without loss of text, with bounded work per character."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orca_jax.bundled import demo_directory
from orca_jax.errors import ConfigError
from orca_jax.text.json_end import JsonEnd
from orca_jax.text.template import load_chat_template
from orca_jax.text.tools import DIALECTS, ForcedCalls, ToolCall, ToolParser, inferred_parser, tool_parser
from tests.text.tool_calls import NAMED, TOOLS, A, B, F, G, parse

TABLE = [
    ("hermes", "no call, a < b and <tool_ca", ["no call, a < b and <tool_ca"]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', [A]),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {}, "name": "get-weather_2"}\n</tool_call>\nDone.',
        ["Let me see.\n", A, B, "\nDone."],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}', [A]),  # the text ends before the closing tag
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool', ...),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}', ...),
    ("hermes", '<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call>', ...),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', ...),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', ...),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "thought": "lost?"}</tool_call>', ...),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', ...),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 01}}</tool_call>', ...),
    ("hermes", "<tool_call>" + '{"a":' * 100_000 + "1" + "}" * 100_000 + "</tool_call>", ...),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', [A]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>{\\"\\\\"}}</tool_call>',
        [ToolCall(F, '{"x": "</tool_call>{\\"\\\\"}')],
    ),
    (
        "hermes",
        '<tool_call><tool_call>{"name": "f", "arguments": {"x": 1}}<tool_call>{"name": "f", "arguments": {"x": 1}}'
        "</tool_call>",
        ['<tool_call><tool_call>{"name": "f", "arguments": {"x": 1}}', A],
    ),
    ("hermes", "  \n", ["  \n"]),
    ("hermes", "", []),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', [A]),
    ("llama3_json", '\n<|python_tag|>{"name": "f", "parameters": {"x": 1}}\n', [A]),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}; {"name": "get-weather_2", "parameters": {}}', [A, B]),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}}; and so on', [A, "; and so on"]),
    ("llama3_json", '{"name": "f", "parameters": {"x": 1}} is a call', ...),
    ("llama3_json", 'Say {"name": "f", "parameters": {"x": 1}}', ...),
    ("llama3_json", '{"answer": 42}', ...),
    ("llama3_json", "<|python_tag|>print(1)", ...),
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
]


@pytest.mark.parametrize(("dialect", "text", "expected"), TABLE, ids=[f"{d}-{n}" for n, (d, _, _) in enumerate(TABLE)])
def test_table(dialect: str, text: str, expected: list[str | ToolCall]) -> None:
    wanted = [text] if expected is ... else expected
    steps = (len(text) + 1, 1, 7) if len(text) < 1000 else (len(text) + 1, 1000)
    for step in steps:
        assert parse(tool_parser(dialect, [F, G]), text, range(0, len(text), step)) == wanted


fragments = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[", "]", ",", ";", " ", "\n", "<", "[TOOL"),
        *('{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": {}}', '{"name": "h", "arguments": {}}'),
        *('{"', '"', "\\", "{", "}", "word", "é🙂", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ]
)
texts = st.lists(fragments | st.text(max_size=4), max_size=25).map("".join)
MAKERS = [*DIALECTS, "required", "named"]
SYNTAX = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]


def make(kind: str) -> ToolParser:
    if kind in DIALECTS:
        return tool_parser(kind, [F, G])
    return ForcedCalls(TOOLS, "required" if kind == "required" else NAMED)


@settings(deadline=None, max_examples=200)
@given(kind=st.sampled_from(MAKERS), text=texts, cuts=st.lists(st.integers(0, 300), max_size=40))
@example(kind="hermes", text='<tool_call>{"name": "f", "arguments": {}}<tool_call>x', cuts=range(60))
def test_nothing_is_lost_wherever_the_pieces_end(kind: str, text: str, cuts: list[int]) -> None:
    """The output is the input without calls and their syntax, for all divisions into pieces."""
    out = parse(make(kind), text, cuts)
    assert out == parse(make(kind), text)
    at = 0
    for number, item in enumerate(out):
        if isinstance(item, ToolCall):
            start = text.index(item.arguments, at)
            assert item.arguments == text[start : start + len(item.arguments)]
            assert json.loads(item.arguments) in ({}, {"x": 1}) or kind == "named"
            rest = text[at:start]
            for syntax in [*SYNTAX, '"name"', '"f"', '"arguments"', '"parameters"']:
                rest = rest.replace(syntax, "")
            assert not rest.strip(" \t\r\n[]{},;:"), "only syntax is left between the outputs"
            at = start + len(item.arguments)
        else:
            start = text.index(item, at)
            between = text[at:start]
            for syntax in SYNTAX:
                between = between.replace(syntax, "")
            assert number == 0 or not between.strip(" \t\r\n]}"), "only the end of a call is left before a text"
            assert number > 0 or start == 0
            at = start + len(item)
    if not any(isinstance(item, ToolCall) for item in out):
        assert "".join(map(str, out)) == text


def test_text_is_not_held_longer_than_it_has_to_be() -> None:
    parser = tool_parser("hermes", [F])
    assert parser.push("Well, 1 <") == ["Well, 1 "]
    assert parser.push(" 2") == ["< 2"]
    assert parser.push("<tool_call>{not") == ["<tool_call>{not"]
    assert parser.push(" a call") == [" a call"]
    forced = ForcedCalls(TOOLS, "required")
    assert forced.push('[{"name": "f", "arguments": {"x": 1}}') == []
    assert forced.push(",") == [A]


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
    "{",
    '{"',
    '"\\',
    " ",
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("unit", ADVERSARIAL)
def test_a_megabyte_of_almost_calls_is_linear_work(kind: str, unit: str) -> None:
    """A quadratic parser would need hours for these texts."""
    text = unit * (400_000 // len(unit))
    for step in (len(text), 5000):
        parser = make(kind)
        size = 0
        for start in range(0, len(text), step):
            size += sum(len(item) for item in parser.push(text[start : start + step]) if isinstance(item, str))
        size += sum(len(item) for item in parser.finish() if isinstance(item, str))
        assert size <= len(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda v: st.lists(v) | st.dictionaries(st.text(), v),
    ),
    st.text(),
    st.booleans(),
    st.lists(st.integers(0, 60)),
)
def test_the_end_of_json(value: Any, rest: str, ascii_only: bool, cuts: list[int]) -> None:
    written = json.dumps({"v": value}, ensure_ascii=ascii_only)
    scanner, text = JsonEnd(), written + rest
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in pairwise(bounds):
        at = start + scanner.feed(text[start:end], 0)
        if scanner.state != "open":
            break
    assert (scanner.state, at) == ("done", len(written))


def test_no_such_parser() -> None:
    with pytest.raises(ConfigError, match="hermes, llama3_json, mistral"):
        tool_parser("xml", [F])


# Lines of well-known templates that show their format of calls.
TEMPLATES: list[tuple[str, str | None]] = [
    # Qwen 2.5, Qwen 3 and others
    (
        "For each function call, return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
        '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>',
        "hermes",
    ),
    # Hermes 2 Pro and Hermes 3
    ("""{{- '\\n<tool_call>\\n' }}{{- '{ ' }}{{- '"arguments": ' }}{{- '\\n</tool_call> ' }}""", "hermes"),
    # Qwen3-Coder, GLM 4.5, Hunyuan, MiroThinker
    ("{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '</function>\\n</tool_call>' }}", None),
    ("{{- '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key></tool_call>", None),
    ("<tool_calls>[{% for call in calls %}{{ call.function | tojson }}{% endfor %}]</tool_calls>", None),
    ("<use_mcp_tool>\\n<server_name>{{ name }}</server_name></use_mcp_tool> <tool_call></tool_call>", None),
    # Llama 3.1, 3.2 and 3.3; Llama 3.2 and ToolACE with calls as in Python
    (
        """{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
        {{- '"parameters": ' }}""",
        "llama3_json",
    ),
    ("""{{- '<|start_header_id|>user<|end_header_id|>' }}{{- '[func_name1(params_name1=params_value1...)]' }}""", None),
    # Mistral 7B 0.3, Nemo, Small 3.1; Small 3.2 and later
    ("""{{- "[AVAILABLE_TOOLS][" }}{{- "[TOOL_CALLS][" }}{%- set out = tool_call.function|tojson %}""", "mistral"),
    ("""[AVAILABLE_TOOLS]{{- '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + arguments }}""", None),
    # without calls
    ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_the_format_of_calls_is_inferred_from_the_chat_template(template: str, name: str | None) -> None:
    assert inferred_parser(template) == name


@pytest.mark.parametrize("source", ["", str(demo_directory())])
def test_templates_of_this_package_show_tools_and_calls(source: str) -> None:
    """The plain template of presets and the demo's, with a round of calls."""
    call = {"id": "c1", "type": "function", "function": {"name": F, "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
    ]
    template = load_chat_template(source, None)
    assert template is not None
    with template:
        assert inferred_parser(template.tool_source) == "hermes"
        text = template.render(messages, tools=TOOLS)
        assert G in text and "done" in text, "the model sees the tools"
        shown = text[text.index("Go.") :]
        assert [part for part in parse(tool_parser("hermes", [F]), shown, [0]) if isinstance(part, ToolCall)] == [A]
        assert "tool" not in template.render(messages[:1]).lower()
