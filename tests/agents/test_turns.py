"""One tool turn of each agent, replayed from its recorded bodies against a server that is started as a user does.

`python -m lab judges` runs the agents themselves, by their names, and records the bodies.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.judges.agent_table import AGENTS
from tests.agents.checkpoint import ANSWER, CONTEXT, ENDLESS, LOOP, TITLE, Call, write_checkpoint
from tests.fixtures.agents.recorded import recorded_turns
from tests.serve.played import user
from tests.serve.running import running

FLAGS = ("--served-model-name", "coder", "--max-num-seqs", "8")
ROUTES = {
    "codex": ("/v1/responses", "input", "output"),
    "claude-code": ("/v1/messages", "messages", "content"),
}
CHAT = ("/v1/chat/completions", "messages", "choices")

pytestmark = pytest.mark.slow


def test_the_model_says_what_its_last_token_decides(tmp_path: Path) -> None:
    called = Call("run", {"command": "cat note.txt"})
    write_checkpoint(tmp_path, called)
    tools = [{"type": "function", "function": {"name": called.name}}]

    def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        answer = server.http.post(
            "/v1/chat/completions", json={"model": "coder", "messages": messages, **fields}
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()["choices"][0]
        return found

    with running(*FLAGS, model=str(tmp_path)) as server:
        (card,) = server.http.get("/v1/models").json()["data"]
        assert card["id"] == "coder" and card["max_model_len"] == CONTEXT
        asked = chat(user("Print it."), tools=tools)
        (call,) = asked["message"]["tool_calls"]
        assert asked["finish_reason"] == "tool_calls" and call["function"]["name"] == called.name
        assert json.loads(call["function"]["arguments"]) == called.arguments
        result = {"role": "tool", "tool_call_id": call["id"], "content": "a note"}
        answered = chat(
            user("Print it."), {"role": "assistant", "tool_calls": [call]}, result, tools=tools
        )
        assert (answered["message"]["content"], answered["finish_reason"]) == (ANSWER, "stop")
        assert chat(user("A title, please."))["message"]["content"] == TITLE
        endless = chat(user(f"{ENDLESS}."), tools=tools, max_tokens=7)
        assert endless["finish_reason"] == "length" and endless["message"]["content"].startswith(
            LOOP * 2
        )


@pytest.mark.parametrize("name", AGENTS)
def test_the_second_turn_finds_the_prompt_of_the_first(name: str, tmp_path: Path) -> None:
    recorded = recorded_turns(name.replace("-", "_"))
    path, field, output = ROUTES.get(name, CHAT)
    call = AGENTS[name].call
    write_checkpoint(tmp_path, call)
    prompts = []
    with running(*FLAGS, model=str(tmp_path)) as server:
        for turn, said in (("first", call.name), ("second", ANSWER)):
            body = {
                **recorded["fields"],
                "model": "coder",
                "tools": recorded["tools"],
                field: recorded[turn],
            }
            body["stream"] = False
            body.pop("stream_options", None)
            answer = server.http.post(path, json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            assert f'"{said}"' in json.dumps(answer.json()[output])
            prompts.append(tokens_of(answer.json()["usage"]))
    (first, _), (second, cached) = prompts
    assert second > first and cached >= 0.9 * first


def tokens_of(usage: dict[str, Any]) -> tuple[int, int]:
    """The tokens of a prompt, and those of them from the prefix cache."""
    read = usage.get("cache_read_input_tokens", 0)
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return usage.get("prompt_tokens", usage.get("input_tokens")) + read, read + details.get(
        "cached_tokens", 0
    )
