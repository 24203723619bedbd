"""Settings of the server that are defaults of all its calls: sampling, variables of the template, and token counts."""

import json
from pathlib import Path
from typing import Any

import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.serve.played import Stage, on_stage, saying, user

ENGINE = EngineConfig(model="m")


def posted(
    config: ServerConfig, *bodies: dict[str, Any], path: str = "/v1/chat/completions"
) -> list[tuple[Any, Any]]:
    """Each answer, and the request that the engine got."""

    async def act(stage: Stage) -> list[tuple[Any, Any]]:
        found = []
        async with stage.http() as http:
            for body in bodies:
                answer = await http.post(path, json={"model": "m", **body})
                assert answer.status_code == 200, answer.text
                found.append((answer, stage.link.submitted[-1]))
        return found

    return on_stage(saying("hi"), act, config, chats=True)


def test_sampling_defaults_may_be_replaced() -> None:
    config = ServerConfig(ENGINE, override_generation_config='{"temperature": 0.25, "top_k": 7}')
    plain, own = posted(config, {"messages": [user("x")]}, {"messages": [user("x")], "top_k": 3})
    assert (plain[1].params.temperature, plain[1].params.top_k) == (0.25, 7)
    assert own[1].params.top_k == 3, "a call has the last word"


def test_variables_of_the_template_have_defaults(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{{ messages[0].content }}|{{ enable_thinking }}|{{ extra }}", encoding="utf-8"
    )
    defaults = '{"enable_thinking": false, "extra": "e"}'
    config = ServerConfig(
        ENGINE, chat_template=str(template), default_chat_template_kwargs=defaults
    )
    asked = {"messages": [user("x")], "chat_template_kwargs": {"enable_thinking": True}}
    plain, own = posted(config, {"messages": [user("x")]}, asked)
    assert bytes(plain[1].prompt_ids) == b"x|False|e"
    assert bytes(own[1].prompt_ids) == b"x|True|e", "a call has the last word"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_every_stream_may_have_token_counts(path: str) -> None:
    body: dict[str, Any] = (
        {"prompt": "x"} if path == "/v1/completions" else {"messages": [user("x")]}
    )
    asked = [
        {**body, "stream": True},
        {**body, "stream": True, "stream_options": {"include_usage": False}},
        body,
    ]
    for forced in (False, True):
        config = ServerConfig(ENGINE, enable_force_include_usage=forced)
        *streams, whole = [answer for answer, _ in posted(config, *asked, path=path)]
        for answer in streams:
            lines = [
                line.removeprefix("data: ")
                for line in answer.text.splitlines()
                if line.startswith("data: {")
            ]
            last = json.loads(lines[-1])
            assert (last.get("usage") is not None and last["choices"] == []) is forced
        assert whole.json()["usage"]["completion_tokens"] == 3
