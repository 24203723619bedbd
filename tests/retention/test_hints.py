"""Wishes of calls about their cache: they reach the engine from all APIs, and wrong ones are refused by name."""

from typing import Any

import httpx
import pytest

from orca_jax.server_config import ServerConfig
from orca_jax.values.cache_hints import MOST_WISHES, CacheHints, CacheWish
from orca_jax.values.config import EngineConfig
from tests.serve.played import Stage, on_stage, saying, user
from tests.serve.running import Server

HEARD = ServerConfig(EngineConfig(model="m", retention="lru-ttl"))
UNHEARD = ServerConfig(EngineConfig(model="m"))
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [user("x")]},
    "/v1/messages": {"messages": [user("x")], "max_tokens": 9},
    "/v1/responses": {"input": "x"},
}
IGNORED = "x-orca-ignored-fields"


def asked(
    path: str, config: ServerConfig = HEARD, **fields: Any
) -> tuple[httpx.Response, CacheHints | None]:
    """The answer of a call, and the hints that the engine got."""

    async def act(stage: Stage) -> tuple[httpx.Response, CacheHints | None]:
        async with stage.http() as http:
            answer = await http.post(path, json={"model": "m", **BODIES[path], **fields})
        submitted = stage.link.submitted
        return answer, submitted[0].params.cache_hints if submitted else None

    return on_stage(saying("x"), act, config, chats=True)


def retained(**payload: Any) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0"}
    actions = [{**action, "payload": payload}]
    return {"protocol_version": "0.1", "message_id": "m", "actions": actions}


def of_type(kind: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    found = retained(**payload)
    found["actions"][0] |= {"action_type": kind, "action_version": version}
    return found


WISHES: list[tuple[dict[str, Any], CacheHints]] = [
    ({"prompt_cache_key": "talk"}, CacheHints("talk")),
    ({"prompt_cache_retention": "24h"}, CacheHints(wishes=(CacheWish(ttl=86_400.0),))),
    ({"prompt_cache_retention": "in_memory"}, CacheHints()),
    ({"prompt_cache_options": {"ttl": "30m"}}, CacheHints(wishes=(CacheWish(ttl=1800.0),))),
    ({"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}, CacheHints()),
    ({"cache_control": {"type": "ephemeral"}}, CacheHints(wishes=(CacheWish(ttl=300.0),))),
    (
        {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "new"}},
        CacheHints(wishes=(CacheWish(ttl=3600.0),)),
    ),
    (
        {"kv_hints": retained(scope="s", directives=[{"start": 2, "end": 8, "priority": 80, "duration": 5}])},
        CacheHints("s", wishes=(CacheWish(2, 8, 5.0, 80),)),
    ),
    ({"kv_hints": retained(directives=[{"end": 8, "priority": 80}])}, CacheHints(wishes=(CacheWish(0, 8, None, 80),))),
    (
        {"kv_hints": retained(priority=3, ttl_seconds=2.5, block_hashes=["1"])},
        CacheHints(wishes=(CacheWish(ttl=2.5, priority=3),)),
    ),
    (
        {"kv_hints": of_type("kv.evict", include_current_request=True)},
        CacheHints(ends=True, wishes=(CacheWish(priority=0),)),
    ),
    ({"kv_hints": of_type("kv.evict")}, CacheHints()),
    (
        {"agent_hint": {"session_id": "w", "cache_control": {"ttl": 60}}},
        CacheHints("w", wishes=(CacheWish(ttl=60.0, priority=100),)),
    ),
    (
        {"agent_hint": {"session_id": "w", "context_management": {"edits": [{"type": "evict"}]}}},
        CacheHints("w", ends=True, wishes=(CacheWish(priority=0),)),
    ),
    (
        {"prompt_cache_key": "outer", "agent_hint": {"session_id": "inner"}},
        CacheHints("inner"),
    ),
]  # fmt: skip


@pytest.mark.conforms(
    "completions.prompt_cache_key", "chat.prompt_cache_key", "responses.prompt_cache_key", "messages.prompt_cache_key",
    "completions.prompt_cache_retention", "chat.prompt_cache_retention", "responses.prompt_cache_retention",
    "messages.prompt_cache_retention", "completions.prompt_cache_options", "chat.prompt_cache_options",
    "responses.prompt_cache_options", "messages.prompt_cache_options", "completions.cache_control",
    "chat.cache_control", "responses.cache_control", "messages.cache_control", "completions.kv_hints", "chat.kv_hints",
    "responses.kv_hints", "messages.kv_hints", "completions.agent_hint", "chat.agent_hint", "responses.agent_hint",
    "messages.agent_hint",
)  # fmt: skip
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("fields", "hints"), WISHES, ids=str)
def test_wishes_reach_the_engine(path: str, fields: dict[str, Any], hints: CacheHints) -> None:
    answer, found = asked(path, **fields)
    assert (answer.status_code, found) == (200, hints), answer.text
    assert IGNORED not in answer.headers
    answer, found = asked(path, UNHEARD, **fields)
    assert (answer.status_code, found) == (200, None)
    assert set(answer.headers[IGNORED].split(", ")) == set(fields), "lru hears none"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_key": 5}, "prompt_cache_key"),
        ({"prompt_cache_retention": "for ever"}, "prompt_cache_retention"),
        ({"prompt_cache_options": "30m"}, "prompt_cache_options"),
        ({"prompt_cache_options": {"mode": "none"}}, "prompt_cache_options.mode"),
        ({"cache_control": {"type": "permanent"}}, "cache_control.type"),
        ({"cache_control": {"ttl": 300}}, "cache_control.ttl"),
        ({"kv_hints": {"protocol_version": "0.1", "actions": []}}, "kv_hints.message_id"),
        ({"kv_hints": of_type("kv.retain") | {"actions": {}}}, "kv_hints.actions"),
        (
            {"kv_hints": retained(directives=[{"start": 0, "end": 4}])},
            "kv_hints.actions[0].payload.directives[0]",
        ),
        (
            {"kv_hints": retained(directives=[{"start": 4, "end": 4, "priority": 1}])},
            "kv_hints.actions[0].payload.directives[0].end",
        ),
        ({"kv_hints": retained(priority=True)}, "kv_hints.actions[0].payload.priority"),
        ({"kv_hints": retained(ttl_seconds=1e9)}, "kv_hints.actions[0].payload.ttl_seconds"),
        ({"agent_hint": []}, "agent_hint"),
        ({"agent_hint": {"cache_control": {"ttl": 3601}}}, "agent_hint.cache_control.ttl"),
        (
            {"agent_hint": {"context_management": {"manage_request": True}}},
            "agent_hint.context_management.manage_request",
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("config", [HEARD, UNHEARD], ids=["heard", "unheard"])
def test_wrong_types_are_refused_by_name(
    fields: dict[str, Any], param: str, config: ServerConfig
) -> None:
    for path in ("/v1/chat/completions", "/v1/responses"):
        answer, _ = asked(path, config, **fields)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"kv_hints": of_type("kv.fetch", keys=[1])}, "kv_hints.actions.kv.fetch"),
        ({"kv_hints": of_type("kv.retain", "2.0", priority="?")}, "kv_hints.actions.kv.retain"),
        ({"agent_hint": {"parent_session_id": "p"}}, "agent_hint.parent_session_id"),
        (
            {"agent_hint": {"cache_control": {"block_offset": 4}}},
            "agent_hint.cache_control.block_offset",
        ),
        (
            {"agent_hint": {"context_management": {"edits": [{"type": "prefetch"}]}}},
            "agent_hint.context_management.edits",
        ),
    ],
)
def test_what_is_not_known_is_ignored_and_named(fields: dict[str, Any], names: str) -> None:
    answer, found = asked("/v1/chat/completions", **fields)
    assert (answer.status_code, answer.headers[IGNORED], found) == (200, names, CacheHints())


LONG = "A rule for the model. " * 40


def test_marks_of_messages_end_parts_of_the_prompt() -> None:
    system = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    mark = {"cache_control": {"type": "ephemeral"}}
    text = {"type": "text", "text": "Find the file.", **mark}
    answer, hints = asked(
        "/v1/messages", system=system, messages=[{"role": "user", "content": [text]}]
    )
    assert answer.status_code == 200 and hints is not None
    short, long = hints.wishes
    assert (short.ttl, long.ttl) == (300.0, 3600.0), "the longest time counts, so it comes last"
    assert long.end is not None and short.end is not None
    # the tokenizer of the test has one token for each byte
    assert len(LONG) <= long.end < len(LONG) + len("Find the file.") < short.end
    answer, _ = asked(
        "/v1/messages", UNHEARD, system=system, messages=[{"role": "user", "content": [text]}]
    )
    assert answer.headers[IGNORED] == "system.cache_control, messages.content.cache_control"


def test_a_mark_whose_text_is_not_found_is_about_the_whole_prompt() -> None:
    tool = {"name": "f", "input_schema": {}, "cache_control": {}}
    answer, hints = asked("/v1/messages", tools=[tool])
    usage = answer.json()["usage"]
    assert hints == CacheHints(wishes=(CacheWish(0, usage["input_tokens"], 300.0),))


@pytest.mark.parametrize("field", ["cache_control", "prompt_cache_breakpoint"])
def test_marks_of_chats_do_not_reach_the_template(field: str) -> None:
    part = {"type": "text", "text": LONG}
    messages = [{"role": "system", "content": [{**part, field: {}}]}, user("go")]
    marked, hints = asked("/v1/chat/completions", messages=messages)
    plain, none = asked(
        "/v1/chat/completions", messages=[{"role": "system", "content": [part]}, user("go")]
    )
    assert marked.json()["usage"] == plain.json()["usage"] and none is None
    assert hints is not None and len(hints.wishes) == 1
    tool = {"type": "function", "function": {"name": "f"}}
    first = asked("/v1/chat/completions", tools=[{**tool, "cache_control": {}}])[0]
    second = asked("/v1/chat/completions", tools=[tool])[0]
    assert first.json()["usage"] == second.json()["usage"]


def test_a_breakpoint_of_responses() -> None:
    parts = [{"type": "input_text", "text": LONG, "prompt_cache_breakpoint": {"mode": "explicit"}}]
    answer, hints = asked("/v1/responses", input=[{"role": "user", "content": parts}])
    assert answer.status_code == 200, answer.text
    assert hints is not None and [wish.ttl for wish in hints.wishes] == [1800.0]


def test_many_marks_and_wishes() -> None:
    part = {"type": "text", "text": "x", "cache_control": {}}
    answer, hints = asked(
        "/v1/chat/completions", messages=[{"role": "user", "content": [part] * 200}]
    )
    assert answer.status_code == 200 and hints is not None
    assert len(hints.wishes) == MOST_WISHES, "the last ones count"
    directives = [{"start": n, "end": n + 1, "priority": 1} for n in range(16)]
    envelope = retained(directives=directives)
    envelope["actions"] *= 2
    answer, _ = asked("/v1/chat/completions", kv_hints=envelope)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_hints"


def test_written_tokens_are_those_that_were_not_there(server: Server) -> None:
    def usage(path: str, **body: Any) -> dict[str, Any]:
        answer = server.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["usage"])

    text = "Which pages are written by this prompt, and which ones are read?"
    first = usage("/v1/completions", prompt=text, max_tokens=2)
    again = usage("/v1/completions", prompt=text, max_tokens=2)
    longer = usage("/v1/completions", prompt=text + "x" * 20, max_tokens=2)
    number = len(text)
    assert first["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": number}
    assert again["prompt_tokens_details"] == {"cached_tokens": number - 1, "cache_write_tokens": 0}
    details = longer["prompt_tokens_details"]
    assert details["cached_tokens"] + details["cache_write_tokens"] == number + 20
    assert details["cache_write_tokens"] >= 20
    talk = [user("Is it counted in messages, too?")]
    one = usage("/v1/messages", messages=talk, max_tokens=2)
    two = usage("/v1/messages", messages=talk, max_tokens=2)
    assert one["input_tokens"] == 0 < one["cache_creation_input_tokens"]
    assert two["input_tokens"] == 1 and two["cache_creation_input_tokens"] == 0
    other = usage("/v1/responses", input="And in responses?", max_output_tokens=2)
    assert other["input_tokens_details"]["cache_write_tokens"] > 0
