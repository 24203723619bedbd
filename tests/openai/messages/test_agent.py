"""The calls of Claude Code 2.1.197 in one tool turn: recorded keys, types and lengths, with filler for all prose."""

from pathlib import Path

import msgspec
import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.fixtures.agents.recorded import recorded_turns
from tests.openai.messages.talks import MESSAGES, Talk, talk
from tests.serve.played import READY

BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,mid-conversation-system-2026-04-07"
LARGE = msgspec.structs.replace(READY, max_model_len=200_000, n_slots=200_000)
# Without a place for later system messages, and with one.
TEMPLATES = {
    "strict": "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}",
    "free": "{% for m in messages %}",
}
REST = """
{%- if loop.first and tools %}{{ tools | tojson }}{% endif %}<{{ m.role }}>{{ m.content }}
{%- if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{% endfor %}<assistant>"""


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_second_turn_finds_the_prompt_of_the_first(name: str, tmp_path: Path) -> None:
    recorded = recorded_turns("claude_code")
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATES[name] + REST, encoding="utf-8")

    async def act(found: Talk) -> None:
        await found.stage.service.set_ready(LARGE)
        prompts = []
        for turn in ("first", "second"):
            fields = {
                **recorded["fields"],
                "tools": recorded["tools"],
                "messages": recorded[turn],
                "stream": True,
            }
            fields["system"][0]["text"] += f" cch={turn};"
            headers = {
                "anthropic-version": "2023-06-01",
                "anthropic-beta": BETAS,
                "x-api-key": "unused",
            }
            answer = await found.post(f"{MESSAGES}?beta=true", headers=headers, **fields)
            assert answer.status_code == 200, answer.text
            ignored = set(answer.headers["x-orca-ignored-fields"].split(", "))
            assert {
                "context_management",
                "metadata",
                "system.x-anthropic-billing-header",
            } <= ignored
            prompts.append(bytes(found.link.submitted[-1].prompt_ids).decode())
        first, second = prompts
        assert "cch=" not in first + second and len(first) > 60_000
        differences = (
            at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other
        )
        assert next(differences, len(first)) >= 0.9 * len(first)
        assert second.rindex("<tool>") > second.rindex("<user>"), (
            "the result of the tool comes last"
        )

    talk(
        act,
        config=ServerConfig(
            EngineConfig(model="m"), chat_template=str(path), tool_call_parser="hermes"
        ),
    )
