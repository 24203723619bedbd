"""An agent from npm finishes one tool turn, and its second call finds the prompt of the first in the prefix cache.

    judge_agent.py --agent NAME --modules FOLDER --url ... --model ... --api-key ... --report FILE

The bodies of both calls are written into the folder of `--modules` as `NAME.json`, as in tests/fixtures/agents:
with keys, types and lengths, and without prose.
"""

import json
import secrets
import subprocess
import sys
import tempfile
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.judges.agent_table import AGENTS, NOTE, Agent, environment
from lab.judges.clients import checks
from lab.judges.clients.checks import expect
from lab.judges.recorder import Exchange, Recorder
from tests.agents.checkpoint import ANSWER
from tests.fixtures.agents.recorded import masked

SECONDS = 240
CACHED = 0.9
ROUTES = {"/v1/responses": "input", "/v1/messages": "messages", "/v1/chat/completions": "messages"}
"""Routes of models, and the field with the conversation."""

Call = tuple[dict[str, Any], Exchange]


class Turn:
    """A finished run of an agent, with its calls that have tools."""

    def __init__(self, agent: Agent, settings: checks.Settings, modules: Path) -> None:
        self.agent = agent
        self.note = secrets.token_hex(8)
        self._seen: list[Exchange] = []
        with (
            tempfile.TemporaryDirectory() as home,
            tempfile.TemporaryDirectory() as work,
            Recorder(
                urllib.parse.urlsplit(settings.url).port or 80, self._seen.append
            ).running() as recorder,
        ):
            (Path(work) / NOTE).write_text(self.note, encoding="utf-8")
            marks = {
                "url": f"http://127.0.0.1:{recorder.port}",
                "model": settings.model,
                "key": settings.api_key,
            }
            variables = environment(agent, Path(home), modules, **marks)
            self.done = subprocess.run(
                list(agent.words),
                cwd=work,
                env=variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
            )

    @property
    def calls(self) -> list[Call]:
        """Calls of the model with tools."""
        return calls_with_tools(self._seen)

    @property
    def statuses(self) -> list[str]:
        """Each call with the status of its answer."""
        return [f"{exchange.method} {exchange.target} {exchange.status}" for exchange in self._seen]


def calls_with_tools(seen: Iterable[Exchange]) -> list[Call]:
    """Bodies and exchanges of calls of the model with tools."""
    found = []
    for exchange in seen:
        if exchange.method == "POST" and exchange.target.partition("?")[0] in ROUTES:
            body = json.loads(exchange.request_body)
            if body.get("tools"):
                found.append((body, exchange))
    return found


def finishes_a_tool_turn(turn: Turn) -> None:
    said = f"{turn.statuses}\n{turn.done.stdout[-1500:]}\n{turn.done.stderr[-1500:]}"
    expect(turn.done.returncode == 0, f"it ended with {turn.done.returncode}: {said}")
    expect(ANSWER in turn.done.stdout, f"it does not print the answer: {said}")
    expect(len(turn.calls) == 2, f"{len(turn.calls)} calls with tools: {said}")
    (first, _), (second, exchange) = turn.calls
    field = ROUTES[exchange.target.partition("?")[0]]
    expect(turn.note not in json.dumps(first), "the first call has the note already")
    expect(
        turn.note in json.dumps(second[field]),
        f"the result of the tool is missing: {second[field][-2:]}",
    )


def every_call_is_answered(turn: Turn) -> None:
    refused = [status for status in turn.statuses if status.rpartition(" ")[2] != "200"]
    expect(not refused, f"refused: {refused}")


def the_second_call_reuses_the_first_prompt(turn: Turn) -> None:
    (first, _), (second, cached) = (usage(exchange) for _, exchange in turn.calls[:2])
    print(
        f"prompts of {first} and {second} tokens, {cached} of the second from the prefix cache",
        file=sys.stderr,
    )
    expect(cached >= CACHED * first, f"{cached} of {first} tokens")


def usage(exchange: Exchange) -> tuple[int, int]:
    """The tokens of a prompt and those from the prefix cache, from the answer to a call."""
    prompt, cached = 0, 0
    for found in usages(bytes(exchange.body).decode()):
        read = found.get("cache_read_input_tokens", 0)
        details = found.get("input_tokens_details") or found.get("prompt_tokens_details") or {}
        prompt = max(prompt, found.get("prompt_tokens", found.get("input_tokens", 0)) + read)
        cached = max(cached, read, details.get("cached_tokens", 0))
    expect(prompt > 0, f"no usage in {bytes(exchange.body[-300:])!r}")
    return prompt, cached


def usages(text: str) -> Iterator[Mapping[str, Any]]:
    """The objects `usage` in the events of a stream, or in a whole answer."""
    parts = [
        line.removeprefix("data:") for line in text.splitlines() if line.startswith("data:")
    ] or [text]
    for part in parts:
        if part.strip() == "[DONE]":
            continue
        event = json.loads(part)
        for place in (event, event.get("response"), event.get("message")):
            if place and place.get("usage"):
                yield place["usage"]


def record(calls: Sequence[Call], file: Path) -> None:
    """Write the bodies of two calls without their prose."""
    (first, exchange), (second, _) = calls[:2]
    field = ROUTES[exchange.target.partition("?")[0]]
    fields = {name: value for name, value in first.items() if name not in (field, "tools")}
    parts = {
        "first": first[field],
        "second": second[field],
        "fields": fields,
        "tools": first["tools"],
    }
    lines = ",\n".join(f'"{name}": {json.dumps(masked(part))}' for name, part in parts.items())
    file.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


def main() -> int:
    """Run the agent and the checks."""
    parser = checks.parser(__doc__)
    parser.add_argument("--agent", required=True, choices=AGENTS, help="the agent")
    parser.add_argument("--modules", type=Path, required=True, help="folder with node_modules")
    args = parser.parse_args()
    agent = AGENTS[args.agent]
    settings = checks.Settings(args.url, args.model, args.api_key, args.report)
    turn = Turn(agent, settings, args.modules)
    package = args.modules / "node_modules" / agent.package / "package.json"
    versions = {agent.package: json.loads(package.read_text(encoding="utf-8"))["version"]}
    tests = [finishes_a_tool_turn, every_call_is_answered, the_second_call_reuses_the_first_prompt]
    code = checks.run(tests, turn, versions, settings.report)
    if code == 0:
        record(turn.calls, args.modules / f"{args.agent}.json")
    return code


if __name__ == "__main__":
    sys.exit(main())
