"""Calls as chat templates write them, read back: equal names and arguments, for every cut into two pieces."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from orca_jax.text.calls.dialects import DIALECTS, tool_parser
from orca_jax.text.calls.parts import Reasoning, ToolCall, joined
from orca_jax.text.template import ChatTemplate

# The part of a template for the calls of one message, in the form of the families.
LLAMA = (
    """{% for c in messages[1].tool_calls %}{{ '; ' if not loop.first }}{"name": "{{ c.function.name }}", """
    + ('"parameters": {{ c.function.arguments | tojson }}}{% endfor %}')
)
OBJECT = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
TEMPLATES: list[tuple[str, str]] = [
    # Qwen 2.5 and 3, Hermes
    (
        "hermes",
        "{{ messages[1].content }}{% for c in messages[1].tool_calls %}{{ '\n<tool_call>\n' }}"
        + OBJECT
        + "{{ '\n"
        "</tool_call>' }}{% endfor %}",
    ),
    # Llama 3.1 to 3.3
    ("llama3_json", LLAMA),
    # Mistral up to Small 3.1
    (
        "mistral",
        "{{ messages[1].content }}[TOOL_CALLS] [{% for c in messages[1].tool_calls %}{{ c.function | tojson }}"
        "{{ ', ' if not loop.last }}{% endfor %}]",
    ),
    # Mistral Small 3.2 and later
    (
        "mistral",
        "{{ messages[1].content }}{% for c in messages[1].tool_calls %}[TOOL_CALLS]{{ c.function.name }}"
        "[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
    ),
    # Qwen3-Coder
    (
        "qwen3_coder",
        "{{ messages[1].content }}{% for c in messages[1].tool_calls %}{{ '\n<tool_call>\n<function=' }}"
        "{{ c.function.name }}{{ '>\n' }}{% for key, value in c.function.arguments | items %}{{ '<parameter=' }}"
        "{{ key }}{{ '>\n' }}{{ value | tojson if value is mapping or (value is sequence and value is not string) else "
        "value | string }}{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}",
    ),
    # Llama 3.2 and 4 with calls as in Python
    (
        "pythonic",
        "[{% for c in messages[1].tool_calls %}{{ ', ' if not loop.first }}{{ c.function.name }}({% for key, value in "
        "c.function.arguments | items %}{{ ', ' if not loop.first }}{{ key }}={{ '%r' | format(value) }}{% endfor %})"
        "{% endfor %}]",
    ),
]
GLM = (
    "{{ messages[1].content }}{% for c in messages[1].tool_calls %}{{ '\n<tool_call>' + c.function.name }}{{ nl }}"
    "{% for key, value in c.function.arguments | items %}<arg_key>{{ key }}</arg_key>{{ nl }}<arg_value>"
    "{{ value if value is string else value | tojson }}</arg_value>{{ nl }}{% endfor %}</tool_call>{% endfor %}"
)
GEMMA = """{%- macro shown(value) -%}
{%- if value is string -%}QUOTE{{ value }}QUOTE
{%- elif value is boolean -%}{{ 'true' if value else 'false' }}
{%- elif value is mapping -%}
{ {%- for key, inner in value | items -%}{{ ',' if not loop.first }}{{ key }}:{{ shown(inner) }}{%- endfor -%} }
{%- elif value is sequence -%}[{% for inner in value %}{{ ',' if not loop.first }}{{ shown(inner) }}{% endfor %}]
{%- else -%}{{ value }}{%- endif -%}{%- endmacro -%}
{{ messages[1].content }}{% for c in messages[1].tool_calls %}STARTcall:{{ c.function.name + '{' -}}
{%- for key, value in c.function.arguments | items -%}{{ ',' if not loop.first }}{{ key }}:{{ shown(value) }}
{%- endfor -%} }END{% endfor %}"""
DEEPSEEK = (
    "{{ messages[1].content }}<｜tool▁calls▁begin｜>{% for c in messages[1].tool_calls %}{{ '\n' if not loop.first }}"
    "<｜tool▁call▁begin｜>CALL<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
)
SEED_MEMBERS = (
    "{% for key, value in c.function.arguments | items %}<parameter={{ key }}>{{ value if value is string else "
    "value | tojson }}</parameter>{{ '\n' }}{% endfor %}"
)
ARGUMENTS = "{{ c.function.arguments | tojson }}"
TEMPLATES += [
    # DeepSeek V3 and R1, and V3.1
    (
        "deepseek_v3",
        DEEPSEEK.replace(
            "CALL",
            "function<｜tool▁sep｜>{{ c.function.name + '\n```json\n' }}"
            + ARGUMENTS
            + "{{ '\n```' }}",
        ),
    ),
    ("deepseek_v3", DEEPSEEK.replace("CALL", "{{ c.function.name }}<｜tool▁sep｜>" + ARGUMENTS)),
    # Kimi K2
    (
        "kimi_k2",
        "{{ messages[1].content }}<|tool_calls_section_begin|>{% for c in messages[1].tool_calls %}<|tool_call_begin|>"
        "functions.{{ c.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        + ARGUMENTS
        + "<|tool_call_end|>"
        "{% endfor %}<|tool_calls_section_end|>",
    ),
    # GLM-4.5 and 4.6, and GLM-4.7
    ("glm45", GLM.replace("nl", "'\n'")),
    ("glm45", GLM.replace("{{ nl }}", "")),
    # Gemma 4, and FunctionGemma
    (
        "gemma4",
        GEMMA.replace("QUOTE", '<|"|>')
        .replace("START", "<|tool_call>")
        .replace("END", "<tool_call|>"),
    ),
    (
        "functiongemma",
        GEMMA.replace("QUOTE", "<escape>")
        .replace("START", "<start_function_call>")
        .replace("END", "<end_function_call>"),
    ),
    # gpt-oss, and the same with the recipient before the channel
    (
        "openai",
        "{% if messages[1].content %}<|channel|>commentary<|message|>{{ messages[1].content }}<|end|><|start|>assistant"
        "{% endif %}{% for c in messages[1].tool_calls %}{{ '<|start|>assistant' if not loop.first }}<|channel|>"
        "commentary to=functions.{{ c.function.name }} <|constrain|>json<|message|>"
        + ARGUMENTS
        + "<|call|>{% endfor %}",
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>A < B.<|end|>{% for c in messages[1].tool_calls %}<|start|>assistant "
        "to=functions.{{ c.function.name }}<|channel|>commentary json<|message|>"
        + ARGUMENTS
        + "<|call|>{% endfor %}",
    ),
    # Seed-OSS
    (
        "seed_oss",
        "{{ messages[1].content }}{% for c in messages[1].tool_calls %}{{ '\n<seed:tool_call>\n<function=' }}"
        "{{ c.function.name }}>\n"
        + SEED_MEMBERS.replace("tojson", "string")
        + "</function>{{ '\n' }}</seed:tool_call>{% endfor %}",
    ),
    # MiniMax-M2
    (
        "minimax_m2",
        "{{ messages[1].content }}{{ '\n<minimax:tool_call>' }}{% for c in messages[1].tool_calls %}{{ '\n<invoke "
        """name="' }}{{ c.function.name }}">{{ '\n' }}"""
        + SEED_MEMBERS.replace("<parameter={{ key }}>", """<parameter name="{{ key }}">""")
        + "</invoke>{% endfor %}{{ '\n' }}</minimax:tool_call>",
    ),
    # Granite 3, Nemotron-H and Nemotron Nano 2, Hunyuan A13B
    *(
        (
            name,
            "{{ messages[1].content }}" + start + "[{% for c in messages[1].tool_calls %}"
            "{{ ', ' if not loop.first }}" + OBJECT + "{% endfor %}]" + end,
        )
        for name, start, end in (
            ("granite", "<|tool_call|>", ""),
            ("nemotron_json", "<TOOLCALL>", "</TOOLCALL>"),
            ("hunyuan_a13b", "<tool_calls>", "</tool_calls>"),
        )
    ),
    # Command R7B and Command A
    (
        "cohere_command3",
        "{{ messages[1].content }}<|START_ACTION|>[{% for c in messages[1].tool_calls %}{{ ',' if not loop.first }}"
        """{{ '\n    {"tool_call_id": "' }}{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", "parameters": """
        + ARGUMENTS
        + "}{% endfor %}{{ '\n' }}]<|END_ACTION|>",
    ),
    # OLMo 3, with values as in Python or as in JSON
    *(
        (
            "olmo3",
            "{{ messages[1].content }}<function_calls>\n{% for c in messages[1].tool_calls %}{{ c.function.name }}("
            "{% for key, value in c.function.arguments | items %}{{ ', ' if not loop.first }}{{ key }}={{ "
            + value
            + " }}{% endfor %})\n{% endfor %}</function_calls>",
        )
        for value in (
            "'%r' | format(value)",
            "'%r' | format(value) if value is string else value | tojson",
        )
    ),
    # LFM2
    (
        "lfm2",
        "{{ messages[1].content }}<|tool_call_start|>"
        + dict(TEMPLATES)["pythonic"]
        + "<|tool_call_end|>",
    ),
]
UNMARKED = ("gemma4", "functiongemma")  # keys of inner objects are written as they are
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "rate": {"type": ["number", "null"]},
                    "on": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    "unit": {"enum": ["m", "km"]},
                    "names": {"type": "array", "items": {"type": "string"}},
                    "place": {"type": "object"},
                },
            },
        },
    }
    for name in ("find", "get-weather_2", "a.b")
]
ALPHABET = "ab 1\n\t\"'\\/{}[]()<>,:;=é🙂\u2028"
WORDS = [
    "",
    "True",
    "null",
    "12",
    "</tool_call>",
    "<tool_call>",
    "[TOOL_CALLS]",
    '{"x": 1}',
    "f(x='1')",
]


def text_of(draw: random.Random) -> str:
    if draw.random() < 0.2:
        return draw.choice(WORDS)
    return "".join(draw.choices(ALPHABET, k=draw.randrange(12)))


def arguments_of(draw: random.Random, key: str) -> dict[str, Any]:
    """Random arguments. `key` is that of an inner object, which is random if it is empty."""
    values = {
        "text": text_of(draw),
        "count": draw.randrange(-(10**12), 10**12),
        "rate": draw.choice([None, 0.5, -1e300, 1e-7, 12]),
        "on": draw.choice([True, False, None]),
        "unit": draw.choice(["m", "km"]),
        "names": [text_of(draw) for _ in range(draw.randrange(3))],
        "place": {
            key or text_of(draw): {"lat": draw.random(), "tags": [text_of(draw), None, True]}
        },
    }
    return {
        key: values[key] for key in draw.sample(sorted(values), draw.randrange(len(values) + 1))
    }


def conversations(seed: int, count: int, key: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    draw = random.Random(seed)
    made = 0
    while made < count:
        calls = [
            {
                "id": "".join(draw.choices("abc123", k=9)),
                "type": "function",
                "function": {
                    "name": draw.choice(["find", "get-weather_2", "a.b"]),
                    "arguments": arguments_of(draw, key),
                },
            }
            for _ in range(draw.choice([1, 1, 2]))
        ]
        made += len(calls)
        yield draw.choice(["", "I look."]), calls


def check(template: ChatTemplate, name: str, seed: int, count: int, every: int) -> None:
    for content, calls in conversations(seed, count, "x y" if name in UNMARKED else ""):
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": content, "tool_calls": calls},
        ]
        text = template.render(messages)
        for cut in range(1, len(text), every):
            parser = tool_parser(name, TOOLS)
            parts = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()]
            found = joined([part for part in parts if not isinstance(part, Reasoning)])
            read = [
                (part.name, json.loads(part.arguments))
                for part in found
                if isinstance(part, ToolCall)
            ]
            assert read == [
                (call["function"]["name"], call["function"]["arguments"]) for call in calls
            ], text
            said = "".join(part for part in found if isinstance(part, str)).strip()
            assert said == (content if content in text else "")


@pytest.mark.parametrize(
    "number", range(len(TEMPLATES)), ids=[f"{n}-{name}" for n, (name, _) in enumerate(TEMPLATES)]
)
def test_calls_of_a_template_are_read_back(number: int) -> None:
    name, source = TEMPLATES[number]
    with ChatTemplate({"default": source}, {}) as template:
        check(template, name, number, 40, every=7)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "number", range(len(TEMPLATES)), ids=[f"{n}-{name}" for n, (name, _) in enumerate(TEMPLATES)]
)
def test_a_thousand_calls_for_every_cut(number: int) -> None:
    name, source = TEMPLATES[number]
    with ChatTemplate({"default": source}, {}) as template:
        check(template, name, 100 + number, 1000, every=1)


def test_every_form_has_a_template() -> None:
    assert {name for name, _ in TEMPLATES} == set(DIALECTS)
