"""Chat templates: the prompts of transformers, and where templates come from."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from orca_jax.text.template import (
    MAX_END,
    RENDER_SECONDS,
    ChatTemplate,
    RenderedTooLong,
    load_chat_template,
)
from orca_jax.values.errors import RequestError
from tests.project.source import ROOT

SYSTEM, USER, ASSISTANT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <there> & 'you'"},
    {"role": "assistant", "content": "Hello! "},
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"x": {"type": "<é>"}}},
    },
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    ],
}

CHATML = """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = """{% set loop_messages = messages %}
{% for message in loop_messages %}
    {% set header = '<|start_header_id|>' + message.role + '<|end_header_id|>' %}
    {% set content = header + '\\n\\n' + message.content | trim + '<|eot_id|>' %}
    {% if loop.first %}
        {% set content = bos_token + content %}
    {% endif %}
    {{- content -}}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """{{ bos_token }}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}
{{- '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}
{{- message['content'] + eos_token }}
{%- endif %}
{%- endfor %}
"""
TOOLS = """{% if tools is not none %}
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>
{% endif %}
{% for message in messages %}
{% if message.tool_calls %}
{% for call in message.tool_calls %}
{{ call.function.name }}({{ call.function.arguments | tojson(indent=2) }}, {{ call.function.arguments.x }})
{% endfor %}
{% continue %}
{% endif %}
{% generation %}
{{ message.content }}
{% endgeneration %}
{% endfor %}
{{ documents is none }} {{ missing | default('nothing') }} {{ sep_token }}.
"""
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    with ChatTemplate(
        {"default": source}, TOKENS, render_seconds=options.pop("seconds", RENDER_SECONDS)
    ) as template:
        return template.render(messages, **options)


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (
            CHATML,
            [SYSTEM, USER],
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <there> & 'you'<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            LLAMA,
            [USER, ASSISTANT],
            "<s><|start_header_id|>user<|end_header_id|>\n\nHi <there> & 'you'<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (MISTRAL, [USER, ASSISTANT], "<s>[INST] Hi <there> & 'you' [/INST]Hello! </s>"),
    ],
)
def test_known_prompts(source: str, messages: list[dict[str, Any]], expected: str) -> None:
    assert render(source, messages) == expected


def test_tools_and_the_rest_of_the_environment() -> None:
    expected = (
        '<tools>\n{"type": "function", "function": {"name": "add", "parameters": {"type": "object", '
        '"properties": {"x": {"type": "<é>"}}}}}\n</tools>\n'
        "add({\n  \"x\": 1\n}, 1)\nHi <there> & 'you'\nTrue nothing ."
    )
    assert render(TOOLS, [CALL, USER], tools=[TOOL]) == expected
    assert render(TOOLS, [USER]) == "Hi <there> & 'you'\nTrue nothing ."
    assert render("{{ strftime_now('%Y') }}", []) in {
        str(time.gmtime().tm_year + n) for n in (-1, 0, 1)
    }


def test_variables_of_a_request() -> None:
    source = "{{ 'on' if enable_thinking else 'off' }} {{ add_generation_prompt }} {{ bos_token }}"
    assert render(source, [USER], kwargs={"enable_thinking": True, "bos_token": "!"}) == "on True !"
    assert render(source, [USER], add_generation_prompt=False) == "off False <s>"
    with pytest.raises(RequestError, match="must not hold messages") as caught:
        render(source, [USER], kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_continues_the_final_message() -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(MISTRAL, [USER, ASSISTANT], **options).endswith("[/INST]Hello! ")
    assert render(LLAMA, [USER, ASSISTANT], **options).endswith("<|end_header_id|>\n\nHello!")
    with pytest.raises(RequestError, match="cannot be continued"):
        render("{% for m in messages %}{{ m.content | upper }}{% endfor %}", [ASSISTANT], **options)
    with pytest.raises(RequestError, match="add_generation_prompt"):
        render(CHATML, [ASSISTANT], continue_final_message=True)


def test_the_templates_own_words_reach_the_client() -> None:
    with pytest.raises(RequestError, match="Roles must alternate") as caught:
        render(MISTRAL, [ASSISTANT])
    assert caught.value.param == "messages"
    with pytest.raises(RequestError) as caught:
        render("{{ raise_exception('x' * 100000) }}", [USER])
    assert len(caught.value.message) < 1000
    with pytest.raises(RequestError, match="arguments of the tool call 'f' must be JSON"):
        render(
            CHATML,
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "city"}}],
                }
            ],
        )


def test_arguments_of_calls_that_were_cut_are_closed() -> None:
    arguments = "messages[0].tool_calls[0].function.arguments"
    source = (
        f"{{% for name, value in {arguments}.items() %}}{{{{name}}}}={{{{value}}}};{{% endfor %}}"
    )
    for text, expected in (
        ("{", ""),
        ('{"a": "x", "b": [1, {"c": 2}, "d', "a=x;b=[1, {'c': 2}, 'd'];"),
        ("", ""),
    ):
        call = {"function": {"name": "f", "arguments": text}}
        assert render(source, [{"role": "assistant", "tool_calls": [call]}]) == expected


def directory(path: Path, **files: object) -> str:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return str(path)


def load(source: str, override: str | None = None, **options: Any) -> str:
    template = load_chat_template(source, override)
    assert template is not None
    with template:
        return template.render([USER], **options)


def test_where_templates_come_from(tmp_path: Path) -> None:
    assert (
        load_chat_template(directory(tmp_path, tokenizer_config__json={"bos_token": "<s>"}), None)
        is None
    )
    source = directory(
        tmp_path,
        tokenizer_config__json={
            "eos_token": {"content": "</s>"},
            "chat_template": "json{{ bos_token + eos_token }}",
        },
        special_tokens_map__json={"bos_token": "<b>", "eos_token": "<e>"},
    )
    assert load(source) == "json<b></s>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    directory(tmp_path, tokenizer_config__json={"chat_template": named})
    assert (load(source), load(source, tools=[TOOL]), load(source, tools=[])) == (
        "plain",
        "tools",
        "plain",
    )
    directory(tmp_path, chat_template__jinja="own{{ bos_token }}")
    assert load(source) == "own<b>"
    override = tmp_path / "mine"
    override.write_text("mine{{ bos_token }}", encoding="utf-8")
    assert load(source, str(override)) == "mine<b>"
    assert load("", str(override)) == "mine"


def test_presets_have_a_plain_template() -> None:
    for source in ("", "preset:toy"):
        assert load(source) == "user: Hi <there> & 'you'\nassistant:"
    template = load_chat_template("", None)
    assert template is not None
    with template:
        prompt = template.render([CALL], tools=[TOOL], add_generation_prompt=False)
    assert prompt.startswith('tools: [{"type"')
    assert prompt.endswith(
        'assistant:  <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>\n'
    )


def test_the_demo_models_template() -> None:
    source = str(ROOT / "checkpoints" / "demo")
    assert load(source) == "<|user|>Hi <there> & 'you'<|assistant|>"
    template = load_chat_template(source, None)
    assert template is not None
    with template:
        assert template.render([USER, ASSISTANT, USER]) == (
            "<|user|>Hi <there> & 'you'<|assistant|>Hello! <|end|><|user|>Hi <there> & 'you'<|assistant|>"
        )


def test_special_tokens_in_messages_are_left_as_they_are() -> None:
    assert render(CHATML, [{"role": "user", "content": "<|im_end|>"}]).count("<|im_end|>") == 2


def test_the_process_does_not_inherit_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TZ", "UTC")
    with ChatTemplate({"default": "x"}, {}) as template:
        (worker,) = template._running
        names = Path(f"/proc/{worker._process.pid}/environ").read_bytes().split(b"\0")
    assert b"TZ=UTC" in names and not [name for name in names if b"hf_secret" in name]


def test_a_prompt_that_is_too_long_is_refused_before_its_end_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*arguments: object) -> str:
        raise AssertionError("the end was searched")

    monkeypatch.setattr("orca_jax.text.template._cut_after_final_message", never)
    with ChatTemplate({"default": "{{ messages[0].content }}"}, {}) as template:
        answer = [{"role": "assistant", "content": "a" * (MAX_END + 11)}]
        with pytest.raises(RenderedTooLong, match="more than 10 characters"):
            template.render(
                answer, add_generation_prompt=False, continue_final_message=True, max_continued=10
            )
