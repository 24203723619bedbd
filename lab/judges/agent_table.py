"""The agents from npm: the tool call of each that its checkpoint generates, and the command that asks for it."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.agents.checkpoint import Call

NOTE = "note.txt"  # the file that the call reads
QUESTION = f"Print the file {NOTE}."
_COMMAND = f"cat {NOTE}"

__all__ = ["AGENTS", "NOTE", "Agent", "environment"]


@dataclass(frozen=True)
class Agent:
    """One agent.

    Attributes:
        package: its name in npm.
        call: the tool call of its model.
        words: its command line, whose first word is a program of `node_modules/.bin`.
        variables: its environment; "{url}", "{model}" and "{key}" stand for the server, the model and the API key.
        files: settings by their path in the home, with the same marks.
    """

    package: str
    call: Call
    words: Sequence[str]
    variables: Mapping[str, str]
    files: Mapping[str, str]


_CODEX = """model = "{model}"
model_provider = "orca"

[model_providers.orca]
name = "orca-jax"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "ORCA_API_KEY"
"""
_OPENCODE = {
    "$schema": "https://opencode.ai/config.json",
    "model": "orca/{model}",
    "provider": {
        "orca": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "orca-jax",
            "options": {"baseURL": "{url}/v1", "apiKey": "{key}"},
            "models": {"{model}": {"name": "{model}", "limit": {"context": 65536, "output": 8192}}},
        }
    },
}
_CONTINUE = """name: local
version: 0.0.1
schema: v1
models:
  - name: {model}
    provider: openai
    model: {model}
    apiBase: {url}/v1
    apiKey: {key}
    roles: [chat, edit, apply]
    capabilities: [tool_use]
"""
_CLINE = {
    "version": 1,
    "lastUsedProvider": "openai-compatible",
    "providers": {
        "openai-compatible": {
            "settings": {
                "provider": "openai-compatible", "apiKey": "{key}", "model": "{model}", "baseUrl": "{url}/v1"
            },
            "updatedAt": "2026-11-24T00:00:00.000Z",
        }
    },
}  # fmt: skip
_CLAUDE_MODELS = (
    "ANTHROPIC_MODEL",
    *(f"ANTHROPIC_DEFAULT_{name}_MODEL" for name in ("OPUS", "SONNET", "HAIKU")),
)
AGENTS: Mapping[str, Agent] = {
    "codex": Agent(
        "@openai/codex",
        Call("exec_command", {"cmd": _COMMAND}),
        ("codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", QUESTION),
        {"ORCA_API_KEY": "{key}"},
        {".codex/config.toml": _CODEX},
    ),
    "claude-code": Agent(
        "@anthropic-ai/claude-code",
        Call("Bash", {"command": _COMMAND, "description": "Print it"}),
        ("claude", "--print", QUESTION, "--allowedTools", "Bash"),
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_API_KEY": "{key}",
            **dict.fromkeys(_CLAUDE_MODELS, "{model}"),
        },
        {},
    ),
    "opencode": Agent(
        "opencode-ai",
        Call("bash", {"command": _COMMAND, "description": "Print it"}),
        ("opencode", "run", QUESTION),
        {},
        {".config/opencode/opencode.json": json.dumps(_OPENCODE)},
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code",
        Call("run_shell_command", {"command": _COMMAND, "is_background": False}),
        ("qwen", "--prompt", QUESTION, "--auth-type", "openai", "--approval-mode", "yolo"),
        {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "{key}", "OPENAI_MODEL": "{model}"},
        {},
    ),
    "continue": Agent(
        "@continuedev/cli",
        Call("Bash", {"command": _COMMAND}),
        ("cn", "--print", QUESTION, "--auto"),
        {},
        {".continue/config.yaml": _CONTINUE},
    ),
    "cline": Agent(
        "cline",
        Call("run_commands", {"commands": [_COMMAND]}),
        ("cline", QUESTION),
        {"CLINE_SESSION_BACKEND_MODE": "local"},  # else it leaves a process that runs on
        {".cline/data/settings/providers.json": json.dumps(_CLINE)},
    ),
}


def environment(agent: Agent, home: Path, modules: Path, **marks: str) -> dict[str, str]:
    """Write the settings of an agent into its home; returns its variables, without those of its user.

    All other addresses lead to a closed port, so that an agent which asks its maker for something is seen to fail.
    """

    def fill(text: str) -> str:
        return re.sub("{(url|model|key)}", lambda found: marks[found[1]], text)

    for name, text in agent.files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(fill(text), encoding="utf-8")
    closed = dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"
    )
    return {
        "PATH": f"{modules / 'node_modules' / '.bin'}{os.pathsep}{os.environ['PATH']}",
        **{"HOME": str(home), "TERM": "dumb", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"},
        **closed,
        **{name: fill(text) for name, text in agent.variables.items()},
    }
