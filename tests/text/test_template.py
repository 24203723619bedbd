"""Chat templates: the prompts of transformers, and malicious templates."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orca_jax.errors import ConfigError, EngineError, RequestError
from orca_jax.text import template_worker
from orca_jax.text.template import RENDER_SECONDS, ChatTemplate, _Worker, load_chat_template
from orca_jax.text.template_worker import Frame
from tests.project.source import ROOT

SYSTEM, USER, ASSISTANT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <there> & 'you'"},
    {"role": "assistant", "content": "Hello! "},
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "<é>"}}}},
}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}],
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
    with ChatTemplate({"default": source}, TOKENS, render_seconds=options.pop("seconds", RENDER_SECONDS)) as template:
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
    assert render("{{ strftime_now('%Y') }}", []) in {str(time.gmtime().tm_year + n) for n in (-1, 0, 1)}


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
        render(CHATML, [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "city"}}]}])


def test_arguments_of_calls_that_were_cut_are_closed() -> None:
    source = (
        "{% for name, value in messages[0].tool_calls[0].function.arguments.items() %}{{name}}={{value}};{% endfor %}"
    )
    for text, expected in (("{", ""), ('{"a": "x", "b": [1, {"c": 2}, "d', "a=x;b=[1, {'c': 2}, 'd'];"), ("", "")):
        call = {"function": {"name": "f", "arguments": text}}
        assert render(source, [{"role": "assistant", "tool_calls": [call]}]) == expected


HARMFUL = {
    "long string": ("{{ 'a' * 10**9 }}", "MemoryError"),
    "padded string": ("{{ '%1000000000d' % 1 }}", "MemoryError"),
    "doubling": (
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "Memory|longer than 1 s",
    ),
    "much text": ("{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}", "more than 4194304 characters"),
    "endless": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than 1 s"),
    "large number": ("{{ 9 ** (messages | length * 9 ** 9) }}", "longer than 1 s|Memory"),
    "long range": ("{{ range(10**9) | list }}", "Range too big"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion depth"),
    "attributes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "attribute filter": ("{{ (messages | attr('__class__')).__name__ }}", "unsafe|undefined"),
    "format": ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "unsafe"),
    "functions' insides": ("{{ raise_exception.__globals__['os'] }}", "unsafe"),
    "mutation": ("{{ messages.append(1) }}", "not safely callable|unsafe"),
    "files": ("{% include '/etc/passwd' %}", "no loader"),
    "imports": ("{% import 'os' as os %}{{ os }}", "no loader"),
}


@pytest.mark.parametrize(("source", "words"), HARMFUL.values(), ids=HARMFUL.keys())
def test_harmful_templates_fail_alone(source: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        render(source, [USER], seconds=1.0 if "longer" in words else 60.0)
    assert caught.value.param == "messages"
    assert "0x" not in caught.value.message and "/" not in caught.value.message.replace(source, "")


@pytest.mark.parametrize(
    "source", ["{{", "{% for x in %}", "{% nonsense %}", "{{ messages | nonsense }}", "{% if x %}" * 200]
)
def test_wrong_templates_fail_at_load(source: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        ChatTemplate({"default": source}, {})
    assert caught.value.param == "chat_template"


@pytest.mark.slow
def test_a_constant_that_takes_for_ever_fails_at_load() -> None:
    with pytest.raises(ConfigError, match="compiling it needed too much memory or processor time"):
        ChatTemplate({"default": "{{ 9 ** (9 ** 9) }}"}, {})


@pytest.fixture
def slow() -> Iterator[ChatTemplate]:
    """A template that never ends for certain messages."""
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    source = f"{{% if messages[0].content == 'slow' %}}{loops}{{% endif %}}{{{{ messages[0].content }}}}"
    with ChatTemplate({"default": source}, {}, render_seconds=3.0) as template:
        yield template


def test_others_go_on_beside_a_slow_one(slow: ChatTemplate) -> None:
    problems: list[RequestError] = []

    def wait() -> None:
        try:
            slow.render([{"role": "user", "content": "slow"}])
        except RequestError as error:
            problems.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    for number in range(20):
        assert slow.render([{"role": "user", "content": str(number)}]) == str(number)
    assert problems == [], "the slow conversation is still running"
    thread.join(60)
    assert [error.param for error in problems] == ["messages"]
    results: list[str] = []
    work = [
        threading.Thread(target=lambda n=n: results.append(slow.render([{"role": "user", "content": str(n)}])))
        for n in range(20)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(60)
    assert sorted(results, key=int) == [str(n) for n in range(20)]


def workers() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if any("template_worker" in word for word in child.cmdline())]


def test_processes_come_back_and_end() -> None:
    before = {child.pid for child in workers()}
    template = ChatTemplate({"default": "{{ messages | length }}"}, {})
    (worker,) = [child for child in workers() if child.pid not in before]
    worker.kill()
    assert template.render([USER]) == "1", "a process that was killed while idle costs no call its answer"
    template.close()
    assert {child.pid for child in workers()} == before
    with pytest.raises((RequestError, EngineError)):
        template.render([USER])


@pytest.mark.parametrize("kills", [1, 2])
def test_a_conversation_is_rendered_once_more_if_its_process_was_killed(
    monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """It is not rendered a third time: the second process may have been killed for its needs."""
    exchange, seen = _Worker.exchange, list[Frame]()

    def exchange_or_die(self: _Worker, frame: Frame, seconds: float) -> Frame:
        if "context" in frame:
            seen.append(frame)
            if len(seen) <= kills:
                self._process.kill()
        return exchange(self, frame, seconds)

    monkeypatch.setattr(_Worker, "exchange", exchange_or_die)
    with ChatTemplate({"default": "{{ messages | length }}"}, {}) as template:
        if kills == 1:
            assert template.render([USER]) == "1"
        else:
            with pytest.raises(RequestError, match="too much memory or processor time"):
                template.render([USER])
        assert len(seen) == 2
        assert template.render([USER]) == "1"


def test_a_conversation_that_exceeds_a_limit_is_not_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, seen = _Worker.exchange, list[Frame]()
    monkeypatch.setattr(
        _Worker, "exchange", lambda self, frame, seconds: (seen.append(frame), exchange(self, frame, seconds))[1]
    )
    source, _ = HARMFUL["endless"]
    with (
        ChatTemplate({"default": source}, {}, render_seconds=0.2) as template,
        pytest.raises(RequestError, match="longer than 0"),
    ):
        template.render([USER])
    assert [frame for frame in seen if "context" in frame] == seen[1:] and len(seen) == 2


def test_a_process_ends_with_its_parent(tmp_path: Path) -> None:
    program = """
from orca_jax.text.template import ChatTemplate
import os, psutil
template = ChatTemplate({"default": "x"}, {})
print(psutil.Process().children()[0].pid, flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    pid = int(done.stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the process outlives its parent"
        time.sleep(0.02)


def test_the_process_cannot_open_files() -> None:
    """This holds even for a template outside of Jinja's sandbox."""
    program = f"""
import runpy, sys
worker = runpy.run_path({str(template_worker.__file__)!r})
worker["_enclose"]()
import socket
for attempt in (lambda: open("/dev/null"), socket.socket, lambda: bytearray(2**30)):
    try:
        attempt()
    except (OSError, MemoryError) as error:
        print(type(error).__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    memory = ["MemoryError"] if sys.platform == "linux" else []
    assert done.stdout.split() == ["OSError", "OSError", *memory]


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
    assert load_chat_template(directory(tmp_path, tokenizer_config__json={"bos_token": "<s>"}), None) is None
    source = directory(
        tmp_path,
        tokenizer_config__json={"eos_token": {"content": "</s>"}, "chat_template": "json{{ bos_token + eos_token }}"},
        special_tokens_map__json={"bos_token": "<b>", "eos_token": "<e>"},
    )
    assert load(source) == "json<b></s>"
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    directory(tmp_path, tokenizer_config__json={"chat_template": named})
    assert (load(source), load(source, tools=[TOOL]), load(source, tools=[])) == ("plain", "tools", "plain")
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
    assert prompt.endswith('assistant:  <tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>\n')


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


def test_messages_that_are_no_json() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for content in (deep, object(), b"bytes"):
        with pytest.raises(RequestError) as caught:
            render(CHATML, [{"role": "user", "content": content}])
        assert caught.value.param == "messages"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "\ud800é漢🙂"}]) == "\ud800é漢🙂"
