"""Tools with a chat template that does not show them: no call is a valid choice, so a chat page can chat."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.openai.chats import CALL, TOOLS, error_of, message_of, only
from tests.serve.played import Stage, chat, on_stage, saying, user

HEADER = "x-orca-ignored-fields"
ALL = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
OF_USERS = "{% for m in messages if m.role in ('user', 'assistant') and not m.tool_calls %}{{ m.content }}{% endfor %}"
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
CALLED = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}

Made = Callable[[str], ServerConfig]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    def make(template: str) -> ServerConfig:
        path = tmp_path / "template.jinja"
        path.write_text(template, encoding="utf-8")
        return ServerConfig(EngineConfig(model="m"), chat_template=str(path))

    return make


@pytest.mark.conforms("chat.tools", "chat.tool_choice")
@pytest.mark.parametrize("fields", [{}, {"tool_choice": "auto"}, {"tool_choice": only("weather")}])
def test_a_template_without_tools_answers_without_them(made: Made, fields: dict[str, Any]) -> None:
    plain, without = chat(saying(CALL), made(ALL))
    answer, link = chat(saying(CALL), made(ALL), tools=TOOLS, **fields)
    assert message_of(answer) == message_of(plain) and "tool_calls" not in message_of(answer)
    assert link.submitted[0].prompt_ids == without.submitted[0].prompt_ids
    assert (answer.headers[HEADER], plain.headers.get(HEADER)) == ("tools", None)


def test_the_log_says_it_once(made: Made, caplog: pytest.LogCaptureFixture) -> None:
    async def act(stage: Stage) -> None:
        async with stage.http() as http:
            for _ in range(3):
                body = {"messages": [user("x")], "tools": TOOLS}
                assert (await http.post("/v1/chat/completions", json=body)).status_code == 200

    on_stage(saying("x"), act, made(ALL), chats=True)
    assert caplog.text.count("shows no tools") == 1


@pytest.mark.conforms("chat.response_format")
def test_with_a_format_the_grammar_is_the_format(made: Made) -> None:
    answer, link = chat(saying("{}"), made(ALL), tools=TOOLS, response_format=SCHEMA)
    structured = link.submitted[0].params.structured
    assert structured is not None and (structured.kind, structured.value) == (
        "json_schema",
        '{"type":"object"}',
    )
    assert message_of(answer)["content"] == "{}" and answer.headers[HEADER] == "tools"


def test_forced_calls_stay_enforced(made: Made) -> None:
    for choice, text in (
        ("required", '[{"name": "clock", "arguments": {}}]'),
        ({"type": "function", "function": {"name": "clock"}}, "{}"),
        (only("clock", mode="required"), '[{"name": "clock", "arguments": {}}]'),
    ):
        answer, link = chat(saying(text), made(ALL), tools=TOOLS, tool_choice=choice)
        assert message_of(answer)["tool_calls"][0]["function"] == {
            "name": "clock",
            "arguments": "{}",
        }
        assert link.submitted[0].params.structured is not None and HEADER not in answer.headers


def test_tools_shown_in_an_unknown_form_are_refused(made: Made) -> None:
    for template in (
        ALL + "{% if tools %}{{ tools | length }}{% endif %}",
        ALL + "{% if tools %}{{ 1 / 0 }}{% endif %}",
    ):
        error = error_of(chat(saying("x"), made(template), tools=TOOLS)[0])
        assert error["param"] == "tool_choice" and "--tool-call-parser" in error["message"]


REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    ([user("x"), {"role": "tool", "tool_call_id": "c", "content": "12:00"}], "messages[1].role"),
    (
        [user("x"), {"role": "assistant", "content": "I look", "tool_calls": [CALLED]}],
        "messages[1].tool_calls",
    ),
]


@pytest.mark.conforms("chat.messages")
@pytest.mark.parametrize(("messages", "param"), REFUSED)
def test_messages_about_calls_are_kept_or_refused(
    made: Made, messages: list[Any], param: str
) -> None:
    text = messages[1]["content"]
    for template in (
        ALL,
        "{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}" + ALL,
    ):
        answer, link = chat(saying("x"), made(template), messages=messages)
        assert answer.status_code == 200 and text.encode() in bytes(link.submitted[0].prompt_ids)
    with_tools = "{% if tools %}" + ALL + "{% else %}" + OF_USERS + "{% endif %}"
    assert chat(saying("x"), made(with_tools), messages=messages)[0].status_code == 200, (
        "a conversation without tools"
    )
    error = error_of(chat(saying("x"), made(OF_USERS), messages=messages)[0])
    assert error["param"] == param and "leaves out" in error["message"]
    assert chat(
        saying("x"), made(OF_USERS), messages=[user("x"), {"role": "assistant", "content": "y"}]
    )[0].is_success
