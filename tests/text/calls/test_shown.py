"""The dialect that a chat template shows."""

import pytest

from orca_jax.helpers.bundled import demo_directory
from orca_jax.text.calls.dialects import (
    DIALECTS,
    inferred_dialect,
    tool_parser,
)
from orca_jax.text.calls.parts import ToolCall
from orca_jax.text.template import load_chat_template
from tests.text.tool_calls import TOOLS, A, F, G, parse

# Lines of well-known templates that show their format of calls.
TEMPLATES: list[tuple[str, str | None]] = [
    # Qwen 2.5, Qwen 3 and others
    (
        "For each function call, return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
        '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>',
        "hermes",
    ),
    # Hermes 2 Pro and Hermes 3
    (
        """{{- '\\n<tool_call>\\n' }}{{- '{ ' }}{{- '"arguments": ' }}{{- '\\n</tool_call> ' }}""",
        "hermes",
    ),
    # Qwen3-Coder, GLM 4.5, Hunyuan, MiroThinker
    (
        "{{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}{{- '<parameter=' + name + '>' }}</tool_call>",
        "qwen3_coder",
    ),
    ("{{- '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key></tool_call>", None),
    (
        "<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>",
        "glm45",
    ),
    (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ type }}<｜tool▁sep｜>{{ name }}",
        "deepseek_v3",
    ),
    ("<|tool_calls_section_begin|>{{ id }}<|tool_call_argument_begin|>{{ arguments }}", "kimi_k2"),
    ("""{{ '<|tool_call>call:' + name }}{{ '<|"|>' + argument + '<|"|>' }}""", "gemma4"),
    ("{{ '<start_function_call>call:' + name + '{' }}", "functiongemma"),
    ("<|tool_call_start|>{{ calls }}<|tool_call_end|>", "lfm2"),
    (
        '{{- "<|start|>assistant<|channel|>commentary to=functions." + name + " json<|message|>" }}',
        "openai",
    ),
    (
        "<tool_calls>[{% for call in calls %}{{ call.function | tojson }}{% endfor %}]</tool_calls>",
        "hunyuan_a13b",
    ),
    ("<seed:tool_call>\\n<function={{ name }}>\\n</function>\\n</seed:tool_call>", "seed_oss"),
    ("""{{ '<minimax:tool_call>' }}{{ '<invoke name="' + call.name + '">' }}""", "minimax_m2"),
    (
        "{{ '<|start_of_role|>system' }} respond only with <|tool_call|> followed by a JSON list of tools",
        "granite",
    ),
    ("{{- '<TOOLCALL>[' }}{{- ']</TOOLCALL>' }}", "nemotron_json"),
    (
        """<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ name }}"}]<|END_ACTION|>""",
        "cohere_command3",
    ),
    ("{{ '<function_calls>' + calls + '</function_calls>' }}", "olmo3"),
    (
        "<use_mcp_tool>\\n<server_name>{{ name }}</server_name></use_mcp_tool> <tool_call></tool_call>",
        None,
    ),
    # Llama 3.1, 3.2 and 3.3; Llama 3.2 and ToolACE with calls as in Python
    (
        """{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
        {{- '"parameters": ' }}""",
        "llama3_json",
    ),
    (
        """{{- '<|start_header_id|>user<|end_header_id|>' }}{{- '[func_name1(params_name1=params_value1...)]' }}""",
        "pythonic",
    ),
    # Mistral 7B 0.3, Nemo, Small 3.1; Small 3.2 and later
    (
        """{{- "[AVAILABLE_TOOLS][" }}{{- "[TOOL_CALLS][" }}{%- set out = tool_call.function|tojson %}""",
        "mistral",
    ),
    (
        """[AVAILABLE_TOOLS]{{- '[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + arguments }}""",
        "mistral",
    ),
    # without calls
    ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
]


@pytest.mark.parametrize(("template", "name"), TEMPLATES)
def test_the_format_of_calls_is_inferred_from_the_chat_template(
    template: str, name: str | None
) -> None:
    found = inferred_dialect(template)
    assert (found and found.name) == name


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
        assert inferred_dialect(template.tool_source) is DIALECTS["hermes"]
        text = template.render(messages, tools=TOOLS)
        assert G in text and "done" in text, "the model sees the tools"
        shown = text[text.index("Go.") :]
        assert [
            part
            for part in parse(tool_parser("hermes", TOOLS), shown, [0])
            if isinstance(part, ToolCall)
        ] == [A]
        assert "tool" not in template.render(messages[:1]).lower()
