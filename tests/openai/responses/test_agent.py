"""The calls of Codex 0.169.0 in one tool turn: recorded keys, types and lengths, with filler for all prose."""

from pathlib import Path

import msgspec

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.fixtures.agents.recorded import recorded_turns
from tests.openai.responses.played import events_of
from tests.serve.played import READY, Stage, on_stage, saying

LARGE = msgspec.structs.replace(READY, max_model_len=200_000, n_slots=200_000)
TEMPLATE = """{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}<assistant>"""
CALL = '<tool_call>{"name": "exec_command", "arguments": {"cmd": "echo x"}}</tool_call>'


def test_a_tool_turn_of_codex(tmp_path: Path) -> None:
    recorded = recorded_turns("codex")
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")

    async def act(stage: Stage) -> None:
        await stage.service.set_ready(LARGE)
        prompts = []
        async with stage.http() as http:
            for turn in ("first", "second"):
                body = {
                    **recorded["fields"],
                    "tools": recorded["tools"],
                    "input": recorded[turn],
                    "stream": True,
                }
                answer = await http.post("/v1/responses", json={"model": "m", **body})
                assert answer.status_code == 200, answer.text
                last = events_of(answer.text)[-1]
                assert last["type"] == "response.completed"
                (call,) = last["response"]["output"]
                assert (call["type"], call["name"]) == ("function_call", "exec_command")
                ignored = set(answer.headers["x-orca-ignored-fields"].split(", "))
                assert {
                    "client_metadata",
                    "prompt_cache_key",
                    "include",
                    "tools.web_search",
                } <= ignored
                prompts.append(bytes(stage.link.submitted[-1].prompt_ids).decode())
        first, second = prompts
        assert len(first) > 35_000 and "multi_agent_v1__" in first and "web_search" not in first
        assert second.startswith(first), "all of the first prompt is found in the prefix cache"

    config = ServerConfig(
        EngineConfig(model="m"), chat_template=str(path), tool_call_parser="hermes"
    )
    on_stage(saying(CALL), act, config, chats=True)
