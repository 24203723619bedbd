"""Chat templates that are refused, and the processes that render them: limits, ends, no files."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from orca_jax.text import template_worker
from orca_jax.text.template import ChatTemplate, _Worker
from orca_jax.text.template_worker import Frame
from orca_jax.values.errors import ConfigError, EngineError, RequestError
from tests.text.test_template import CHATML, USER, render

HARMFUL = {
    "long string": ("{{ 'a' * 10**9 }}", "MemoryError"),
    "padded string": ("{{ '%1000000000d' % 1 }}", "MemoryError"),
    "doubling": (
        "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "Memory|longer than 0.3 s",
    ),
    "much text": (
        "{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}",
        "more than 4194304 characters",
    ),
    "endless": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "longer than 0.3 s",
    ),
    "large number": ("{{ 9 ** (messages | length * 9 ** 9) }}", "longer than 0.3 s|Memory"),
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
        render(source, [USER], seconds=0.3 if "longer" in words else 60.0)
    assert caught.value.param == "messages"
    assert "0x" not in caught.value.message and "/" not in caught.value.message.replace(source, "")


@pytest.mark.parametrize(
    "source",
    ["{{", "{% for x in %}", "{% nonsense %}", "{{ messages | nonsense }}", "{% if x %}" * 200],
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
    source = (
        f"{{% if messages[0].content == 'slow' %}}{loops}{{% endif %}}{{{{ messages[0].content }}}}"
    )
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
        threading.Thread(
            target=lambda n=n: results.append(slow.render([{"role": "user", "content": str(n)}]))
        )
        for n in range(20)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join(60)
    assert sorted(results, key=int) == [str(n) for n in range(20)]


def workers() -> list[psutil.Process]:
    children = [
        child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE
    ]
    return [
        child for child in children if any("template_worker" in word for word in child.cmdline())
    ]


def test_processes_come_back_and_end() -> None:
    before = {child.pid for child in workers()}
    template = ChatTemplate({"default": "{{ messages | length }}"}, {})
    (worker,) = [child for child in workers() if child.pid not in before]
    worker.kill()
    assert template.render([USER]) == "1", (
        "a process that was killed while idle costs no call its answer"
    )
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


def test_a_conversation_that_exceeds_a_limit_is_not_rendered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exchange, seen = _Worker.exchange, list[Frame]()
    monkeypatch.setattr(
        _Worker,
        "exchange",
        lambda self, frame, seconds: (seen.append(frame), exchange(self, frame, seconds))[1],
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
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
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
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    memory = ["MemoryError"] if sys.platform == "linux" else []
    assert done.stdout.split() == ["OSError", "OSError", *memory]


def test_messages_that_are_no_json() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for content in (deep, object(), b"bytes"):
        with pytest.raises(RequestError) as caught:
            render(CHATML, [{"role": "user", "content": content}])
        assert caught.value.param == "messages"
    assert (
        render("{{ messages[0].content }}", [{"role": "user", "content": "\ud800é漢🙂"}])
        == "\ud800é漢🙂"
    )
