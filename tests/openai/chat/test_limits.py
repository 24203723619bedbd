"""Limits of generated tokens beyond the context, and refusals of prompts that are too long."""

import re
from pathlib import Path
from typing import Any

import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.text.template_worker import MAX_OUTPUT
from orca_jax.values.config import EngineConfig
from tests.openai.chats import HERMES, TOOLS, checked, error_of
from tests.openai.messages.talks import ask
from tests.serve.played import CONTEXT, call, chat, saying, user

HEADER = "x-orca-max-tokens"
SILENT = saying()


@pytest.mark.conforms("completions.max_tokens")
def test_a_limit_beyond_the_context_is_cut() -> None:
    answer, link = call(saying("abcd", reason="length"), prompt="x" * 1020, max_tokens=5)
    assert (link.submitted[0].params.max_tokens, answer.headers[HEADER]) == (4, "4")
    assert checked(answer).json()["choices"][0]["finish_reason"] == "length"
    answer, link = call(SILENT, prompt=["x" * 1020, "y"], max_tokens=1000)
    assert [one.params.max_tokens for one in link.submitted] == [4, 1000] and answer.headers[
        HEADER
    ] == "4"


@pytest.mark.conforms("chat.max_tokens", "chat.max_completion_tokens")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_agents_ask_for_more_than_a_small_model_has(name: str, stream: bool) -> None:
    answer, link = chat(saying("Hello.", reason="length"), stream=stream, **{name: 32_000})
    (submit,) = link.submitted
    room = CONTEXT - len(submit.prompt_ids)
    assert (submit.params.max_tokens, answer.headers[HEADER]) == (room, str(room))


@pytest.mark.parametrize(
    "fields", [{}, {"max_tokens": 4}, {"max_tokens": -1}, {"max_tokens": 0, "echo": True}]
)
def test_a_limit_that_fits_is_not_reported(fields: dict[str, Any]) -> None:
    answer, _ = call(SILENT, prompt="x" * 1020, **fields)
    assert answer.status_code == 200 and HEADER not in answer.headers


@pytest.mark.conforms("completions.truncate_prompt_tokens")
def test_a_truncated_prompt_leaves_room_for_the_answer() -> None:
    for limit, kept in ((CONTEXT - 1, 1), (24, 1000), (-1, CONTEXT - 1)):
        answer, link = call(SILENT, prompt="x" * 2000, truncate_prompt_tokens=-1, max_tokens=limit)
        assert answer.status_code == 200 and len(link.submitted[0].prompt_ids) == kept
    for limit in (CONTEXT, 32_000):
        error = error_of(
            call(SILENT, prompt="x" * 2000, truncate_prompt_tokens=-1, max_tokens=limit)[0]
        )
        assert error["param"] == "max_tokens" and f"{CONTEXT} tokens" in error["message"]


@pytest.mark.parametrize(("size", "unit"), [(CONTEXT - 100, "tokens"), (20_000, "characters")])
def test_a_refusal_for_length_says_how_much_is_tools(size: int, unit: str) -> None:
    """Chat pages send dozens of tools with a question of one line."""
    function = {**TOOLS[0]["function"], "description": "x" * size}
    tools = [{"type": "function", "function": function}, TOOLS[1]]
    for kind in (HERMES, None):
        error = error_of(chat(SILENT, kind, tools=tools)[0])
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        share = int(
            error["message"].partition(f" of these {unit} are 2 tools")[0].rpartition(" ")[2]
        )
        assert size < share < size + 1000
    error = error_of(
        chat(SILENT, messages=[user("x" * size * 2)], tools=tools, tool_choice="none")[0]
    )
    assert "tools" not in error["message"]


def test_a_prompt_that_is_too_long_to_be_rendered_has_the_code_for_its_length(
    tmp_path: Path,
) -> None:
    """The template's process gets no conversation beyond the limit. A template may also make a short one long."""
    template = tmp_path / "long.jinja"
    source = "{% if messages[0].content | length > 9999 %}{{ raise_exception('sent') }}{% endif %}"
    template.write_text(
        source + "{% for i in range(99999) %}{{ 'a' * 99 }}{% endfor %}", encoding="utf-8"
    )
    kind = ServerConfig(EngineConfig(model="m"), chat_template=str(template))
    for text in ("x" * (MAX_OUTPUT + 1), "x"):
        error = error_of(chat(SILENT, kind, messages=[user(text)])[0])
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        refused = ask(SILENT, kind, messages=[user(text)])
        assert refused.status_code == 400
        words = refused.json()["error"]["message"]
        assert re.match(rf"prompt is too long: \d+ tokens > {CONTEXT - 1} maximum", words), words
