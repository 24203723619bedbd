"""Calls as chat templates write them, read back: equal names and arguments, for every cut into two pieces."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from orca_jax.text.calls.dialects import DIALECTS, tool_parser
from orca_jax.text.calls.parser import ToolCall, joined
from orca_jax.text.template import ChatTemplate

# The part of a template for the calls of one message, in the form of the families.
LLAMA = """{% for c in messages[1].tool_calls %}{{ '; ' if not loop.first }}{"name": "{{ c.function.name }}", """ + (
    '"parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
)
OBJECT = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
TEMPLATES: list[tuple[str, str]] = [
    # Qwen 2.5 and 3, Hermes
    (
        "hermes",
        "{{ messages[1].content }}{% for c in messages[1].tool_calls %}{{ '\n<tool_call>\n' }}" + OBJECT + "{{ '\n"
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
WORDS = ["", "True", "null", "12", "</tool_call>", "<tool_call>", "[TOOL_CALLS]", '{"x": 1}', "f(x='1')"]


def text_of(draw: random.Random) -> str:
    if draw.random() < 0.2:
        return draw.choice(WORDS)
    return "".join(draw.choices(ALPHABET, k=draw.randrange(12)))


def arguments_of(draw: random.Random) -> dict[str, Any]:
    values = {
        "text": text_of(draw),
        "count": draw.randrange(-(10**12), 10**12),
        "rate": draw.choice([None, 0.5, -1e300, 1e-7, 12]),
        "on": draw.choice([True, False, None]),
        "unit": draw.choice(["m", "km"]),
        "names": [text_of(draw) for _ in range(draw.randrange(3))],
        "place": {text_of(draw): {"lat": draw.random(), "tags": [text_of(draw), None, True]}},
    }
    return {key: values[key] for key in draw.sample(sorted(values), draw.randrange(len(values) + 1))}


def conversations(seed: int, count: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    draw = random.Random(seed)
    made = 0
    while made < count:
        calls = [
            {
                "id": "".join(draw.choices("abc123", k=9)),
                "type": "function",
                "function": {"name": draw.choice(["find", "get-weather_2", "a.b"]), "arguments": arguments_of(draw)},
            }
            for _ in range(draw.choice([1, 1, 2]))
        ]
        made += len(calls)
        yield draw.choice(["", "I look."]), calls


def check(template: ChatTemplate, name: str, seed: int, count: int, every: int) -> None:
    for content, calls in conversations(seed, count):
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": content, "tool_calls": calls}]
        text = template.render(messages)
        for cut in range(1, len(text), every):
            parser = tool_parser(name, TOOLS)
            found = joined([*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.finish()])  # type: ignore[arg-type]
            read = [(part.name, json.loads(part.arguments)) for part in found if isinstance(part, ToolCall)]
            assert read == [(call["function"]["name"], call["function"]["arguments"]) for call in calls], text
            said = "".join(part for part in found if isinstance(part, str)).strip()
            assert said == (content if content in text else "")


@pytest.mark.parametrize("number", range(len(TEMPLATES)), ids=[f"{n}-{name}" for n, (name, _) in enumerate(TEMPLATES)])
def test_calls_of_a_template_are_read_back(number: int) -> None:
    name, source = TEMPLATES[number]
    with ChatTemplate({"default": source}, {}) as template:
        check(template, name, number, 40, every=7)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TEMPLATES)), ids=[f"{n}-{name}" for n, (name, _) in enumerate(TEMPLATES)])
def test_a_thousand_calls_for_every_cut(number: int) -> None:
    name, source = TEMPLATES[number]
    with ChatTemplate({"default": source}, {}) as template:
        check(template, name, 100 + number, 1000, every=1)


def test_every_form_has_a_template() -> None:
    assert {name for name, _ in TEMPLATES} == set(DIALECTS)
