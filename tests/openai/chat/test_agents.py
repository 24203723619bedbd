"""The calls of agents and of Open WebUI 0.12.4 in one tool turn: keys, types and lengths."""

from pathlib import Path

import msgspec
import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.fixtures.agents.recorded import recorded_turns
from tests.openai.chats import deltas
from tests.serve.played import READY, Stage, events, on_stage, saying

LARGE = msgspec.structs.replace(READY, max_model_len=200_000, n_slots=200_000)
TEMPLATE = """{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}<assistant>"""
ARGUMENTS = '{"command": "cat note.txt"}'


@pytest.mark.parametrize(
    ("name", "tool", "shortest"),
    [
        ("opencode", "bash", 25_000),
        ("qwen_code", "run_shell_command", 60_000),
        ("open_webui", "get_current_timestamp", 20_000),
        ("continue", "Bash", 6_000),
        ("cline", "run_commands", 20_000),
    ],
)
def test_a_tool_turn(name: str, tool: str, shortest: int, tmp_path: Path) -> None:
    recorded = recorded_turns(name)
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")

    async def act(stage: Stage) -> None:
        await stage.service.set_ready(LARGE)
        prompts = []
        async with stage.http() as http:
            for turn in ("first", "second"):
                body = {
                    **recorded["fields"],
                    "model": "m",
                    "tools": recorded["tools"],
                    "messages": recorded[turn],
                }
                answer = await http.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                calls = [call for delta in deltas(answer) for call in delta.get("tool_calls") or []]
                assert [
                    call["function"]["name"] for call in calls if call["function"].get("name")
                ] == [tool]
                assert "".join(call["function"].get("arguments", "") for call in calls) == ARGUMENTS
                assert "x-orca-ignored-fields" not in answer.headers
                if "stream_options" in body:
                    assert events(answer)[-1]["usage"]["prompt_tokens"] == len(
                        stage.link.submitted[-1].prompt_ids
                    )
                prompts.append(bytes(stage.link.submitted[-1].prompt_ids).decode())
        first, second = prompts
        assert len(first) > shortest and second.startswith(first), (
            "all of the first prompt is found in the cache"
        )
        assert second.rindex("<tool>") > second.rindex("<user>"), (
            "the result of the tool comes last"
        )

    config = ServerConfig(
        EngineConfig(model="m"), chat_template=str(path), tool_call_parser="hermes"
    )
    on_stage(
        saying(f'<tool_call>{{"name": "{tool}", "arguments": {ARGUMENTS}}}</tool_call>'),
        act,
        config,
        chats=True,
    )
