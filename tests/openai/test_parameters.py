"""Every parameter does what docs/conformance.md says of it, on both routes: what no other test shows already."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from orca_jax.serve.openai.schema import chat_parser, completion_parser, tokenize_parser
from orca_jax.server_config import ServerConfig
from orca_jax.text.tokenizer import ByteTokenizer
from orca_jax.values.config import EngineConfig
from orca_jax.values.request import SamplingParams
from tests.serve.played import Stage, call, events, on_stage, saying, user
from tests.serve.running import MODEL, Server

ROUTES = ("/v1/completions", "/v1/chat/completions")
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "x", "max_tokens": 1},
    "/v1/chat/completions": {"model": MODEL, "messages": [user("x")], "max_tokens": 1},
    "/tokenize": {"model": MODEL, "prompt": "x"},
}

# field, value as sent, what the engine is told
PASSED_ON: list[tuple[str, Any, Any]] = [
    ("temperature", 0.5, 0.5),
    ("top_p", 0.25, 0.25),
    ("top_k", 7, 7),
    ("min_p", 0.125, 0.125),
    ("presence_penalty", 0.5, 0.5),
    ("frequency_penalty", -0.5, -0.5),
    ("repetition_penalty", 1.5, 1.5),
    ("seed", -9, -9),
    ("logit_bias", {"65": 2.5}, {65: 2.5}),
    ("allowed_token_ids", [66, 65], [66, 65]),
    ("stop_token_ids", [67], [67]),
    ("ignore_eos", True, True),
    ("min_tokens", 3, 3),
    ("max_tokens", 11, 11),
]


def submitted(path: str, **fields: Any) -> SamplingParams:
    """What the engine was told."""
    answer, link = call(saying("x", reason="length"), path, **fields)
    assert answer.status_code == 200, answer.text
    return link.submitted[0].params


def text_of(answer: httpx.Response) -> str:
    """The first choice's text, whole or in a stream, of both routes."""
    assert answer.status_code == 200, answer.text
    if "event-stream" in answer.headers["content-type"]:
        choices = [event["choices"][0] for event in events(answer) if event["choices"]]
    else:
        choices = [answer.json()["choices"][0]]
    parts = [choice.get("delta", choice.get("message", choice)) for choice in choices]
    return "".join(part.get("text", part.get("content")) or "" for part in parts)


@pytest.mark.conforms(
    "completions.temperature", "completions.top_p", "completions.top_k", "completions.min_p"
)
@pytest.mark.conforms("completions.presence_penalty", "completions.frequency_penalty")
@pytest.mark.conforms(
    "completions.repetition_penalty", "completions.seed", "completions.logit_bias"
)
@pytest.mark.conforms(
    "completions.allowed_token_ids", "completions.stop_token_ids", "completions.ignore_eos"
)
@pytest.mark.conforms("completions.min_tokens", "completions.max_tokens")
@pytest.mark.conforms(
    "chat.temperature", "chat.top_p", "chat.top_k", "chat.min_p", "chat.presence_penalty"
)
@pytest.mark.conforms(
    "chat.frequency_penalty", "chat.repetition_penalty", "chat.seed", "chat.logit_bias"
)
@pytest.mark.conforms(
    "chat.allowed_token_ids", "chat.stop_token_ids", "chat.ignore_eos", "chat.min_tokens"
)
@pytest.mark.conforms("chat.max_tokens")
@pytest.mark.parametrize("path", ROUTES)
def test_passed_on_to_the_engine(path: str) -> None:
    given = submitted(path, **{name: value for name, value, _ in PASSED_ON})
    plain = submitted(path)
    for name, _, expected in PASSED_ON:
        value = getattr(given, name)
        assert (list(value) if isinstance(value, tuple) else value) == expected, name
        assert value != getattr(plain, name), f"{name}: the value has to differ from the default"


@pytest.mark.conforms("completions.bad_words", "chat.bad_words")
@pytest.mark.parametrize("path", ROUTES)
def test_words_become_ids(path: str) -> None:
    assert [ord("a"), ord("b")] in [
        list(ids) for ids in submitted(path, bad_words=["ab"]).bad_token_ids
    ]


@pytest.mark.conforms("completions.model", "chat.model", "tokenize.model", "detokenize.model")
@pytest.mark.parametrize("path", [*ROUTES, "/tokenize", "/detokenize"])
def test_only_served_models(server: Server, path: str) -> None:
    body = BODIES.get(path, {"tokens": [65]})
    assert server.http.post(path, json={**body, "model": MODEL}).status_code == 200
    answer = server.http.post(path, json={**body, "model": "nobody"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert repr(MODEL) in error["message"] and "--served-model-name" in error["message"]


@pytest.mark.conforms("chat.max_completion_tokens")
def test_newer_name_of_the_limit() -> None:
    assert submitted("/v1/chat/completions", max_completion_tokens=12).max_tokens == 12


@pytest.mark.conforms(
    "completions.stop", "completions.include_stop_str_in_output", "completions.stream"
)
@pytest.mark.conforms("chat.stop", "chat.include_stop_str_in_output", "chat.stream")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_stop_strings(path: str, stream: bool) -> None:
    script = saying("one st", "op two", reason="length")
    for fields, text in (
        ({"stop": "stop"}, "one "),
        ({"stop": ["never", "stop"], "include_stop_str_in_output": True}, "one stop"),
        ({"stop": ["st"]}, "one "),
    ):
        answer, _ = call(script, path, stream=stream, **fields)
        assert text_of(answer) == text, fields


@pytest.mark.conforms("completions.n", "chat.n")
@pytest.mark.parametrize("path", ROUTES)
def test_choices(path: str) -> None:
    answer, link = call(saying("x"), path, n=3)
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2] and len(
        link.submitted
    ) == 3


@pytest.mark.conforms("completions.skip_special_tokens", "chat.skip_special_tokens")
@pytest.mark.parametrize("path", ROUTES)
def test_special_tokens_in_the_text(server: Server, path: str) -> None:
    body = {**BODIES[path], "logit_bias": {"256": 100}, "ignore_eos": True, "max_tokens": 2}
    assert text_of(server.http.post(path, json=body)) == ""
    assert (
        text_of(server.http.post(path, json={**body, "skip_special_tokens": False}))
        == "<|end|>" * 2
    )


class Wrapping(ByteTokenizer):
    """A tokenizer that puts its end token around a prompt."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = super().encode(text)
        return [256, *ids, 256] if add_special_tokens else ids


@pytest.mark.conforms(
    "completions.add_special_tokens", "chat.add_special_tokens", "tokenize.add_special_tokens"
)
@pytest.mark.parametrize(
    ("path", "default"),
    [("/v1/completions", True), ("/v1/chat/completions", False), ("/tokenize", True)],
)
def test_special_tokens_around_the_prompt(path: str, default: bool) -> None:
    async def act(stage: Stage) -> list[bool]:
        model = stage.service.model
        stage.service._model = type(model)(**{**vars_of(model), "tokenizer": Wrapping()})
        found = []
        async with stage.http() as http:
            for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
                answer = await http.post(path, json={**BODIES[path], "model": "m", **fields})
                assert answer.status_code == 200, answer.text
                ids = answer.json().get("tokens") or list(stage.link.submitted[-1].prompt_ids)
                found.append(ids[0] == ids[-1] == 256)
        return found

    assert on_stage(saying("x"), act, chats=True) == [default, True, False]


def vars_of(model: Any) -> dict[str, Any]:
    return {name: getattr(model, name) for name in model.__dataclass_fields__}


@pytest.mark.conforms("completions.truncate_prompt_tokens", "chat.truncate_prompt_tokens")
@pytest.mark.parametrize("path", ROUTES)
def test_truncation_keeps_the_end(path: str) -> None:
    _, link = call(saying("x"), path)
    whole = list(link.submitted[0].prompt_ids)
    long = (
        {"prompt": "a long prompt"} if path == ROUTES[0] else {"messages": [user("a long prompt")]}
    )
    _, link = call(saying("x"), path, truncate_prompt_tokens=4, **long)
    kept = list(link.submitted[0].prompt_ids)
    assert len(kept) == 4 and (path != ROUTES[0] or bytes(kept) == b"ompt") and len(whole) > 0


@pytest.mark.conforms("completions.return_token_ids", "chat.return_token_ids")
@pytest.mark.parametrize("path", ROUTES)
def test_ids_are_answered(path: str) -> None:
    answer, link = call(saying("xyz"), path, return_token_ids=True)
    whole, choice = answer.json(), answer.json()["choices"][0]
    prompt_ids = choice.get("prompt_token_ids") or whole.get("prompt_token_ids")
    assert prompt_ids == list(link.submitted[0].prompt_ids)
    assert bytes(choice["token_ids"][:3]) == b"xyz"
    assert "token_ids" not in call(saying("xyz"), path)[0].text


@pytest.mark.conforms("completions.stream_options", "chat.stream_options")
@pytest.mark.parametrize("path", ROUTES)
def test_usage_in_streams(path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for asked in ({}, {"include_usage": True}, options):
        chunks = events(
            call(saying("ab"), path, stream=True, **({"stream_options": asked} if asked else {}))[0]
        )
        assert ("usage" in chunks[0]) == bool(asked)
        assert (chunks[-1]["choices"] == []) == bool(asked)
        assert bool(chunks[0].get("usage")) == ("continuous_usage_stats" in asked)


@pytest.mark.conforms("completions.request_id", "chat.request_id")
@pytest.mark.parametrize("path", ROUTES)
def test_callers_name_of_the_call(path: str) -> None:
    assert call(saying("x"), path, request_id="mine-1")[0].json()["id"].endswith("-mine-1")


@pytest.mark.conforms(
    "completions.timeout", "completions.queue_timeout", "chat.timeout", "chat.queue_timeout"
)
@pytest.mark.parametrize("path", ROUTES)
def test_callers_deadlines(path: str) -> None:
    for fields, status, code in (
        ({"timeout": 0.1}, 408, "timeout"),
        ({"queue_timeout": 0.1}, 503, "queue_timeout"),
    ):
        answer, link = call(lambda submit: [], path, **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert len(link.aborted) == 1


@pytest.mark.conforms("completions.cache_salt", "chat.cache_salt")
@pytest.mark.parametrize("path", ROUTES)
def test_salt_reaches_the_engine(path: str) -> None:
    salted, plain = submitted(path, seed=1, cache_salt="s"), submitted(path, seed=1)
    assert salted == replace(plain, cache_salt="s")
    assert call(saying("x"), path, cache_salt="")[0].json()["error"]["param"] == "cache_salt"


@pytest.mark.conforms("completions.response_format", "completions.structured_outputs")
@pytest.mark.conforms("chat.response_format", "chat.structured_outputs")
@pytest.mark.parametrize("path", ROUTES)
def test_structure_of_the_text(path: str) -> None:
    schema = {"type": "object"}
    named = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    for fields, kind, value in (
        ({"response_format": {"type": "text"}}, None, None),
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": named}, "json_schema", json.dumps(schema)),
        ({"structured_outputs": {"json": schema}}, "json_schema", json.dumps(schema)),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a","b"]'),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
    ):
        structured = submitted(path, **fields).structured
        assert (structured and structured.kind) == kind, fields
        assert structured is None or structured.value.replace(" ", "") == str(value).replace(
            " ", ""
        ), fields


@pytest.mark.conforms("completions.prompt_logprobs", "chat.prompt_logprobs")
@pytest.mark.parametrize("path", ROUTES)
def test_scores_of_the_prompt(server: Server, path: str) -> None:
    answer = server.http.post(
        path, json={**BODIES[path], "prompt_logprobs": 1, "return_token_ids": True}
    ).json()
    holder = answer if path == ROUTES[1] else answer["choices"][0]
    first, *scores = holder["prompt_logprobs"]
    assert first is None
    for score, token_id in zip(scores, holder["prompt_token_ids"][1:], strict=True):
        assert score[str(token_id)]["logprob"] <= 0 and 1 <= len(score) <= 2


@pytest.mark.conforms(
    "chat.chat_template_kwargs", "chat.add_generation_prompt", "chat.continue_final_message"
)
@pytest.mark.conforms(
    "tokenize.chat_template_kwargs", "tokenize.add_generation_prompt", "tokenize.messages"
)
@pytest.mark.conforms("tokenize.continue_final_message", "tokenize.tools", "chat.messages")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_the_template_is_given(tmp_path: Path, path: str) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{{ mood }}|{% for m in messages %}{{ m.content }}{% endfor %}|{% if tools %}{{ tools[0].function.name }}"
        "{% endif %}|{{ add_generation_prompt }}",
        encoding="utf-8",
    )
    config = ServerConfig(
        EngineConfig(model="m"), chat_template=str(template), tool_call_parser="hermes"
    )
    tools = [{"type": "function", "function": {"name": "clock"}}]
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "|hi||True"),
        ({"chat_template_kwargs": {"mood": "glad"}}, "glad|hi||True"),
        ({"add_generation_prompt": False}, "|hi||False"),
        ({"tools": tools}, "|hi|clock|True"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "|hi"),
    ]

    async def act(stage: Stage) -> list[str]:
        found = []
        async with stage.http() as http:
            for fields, _ in cases:
                answer = await http.post(
                    path, json={"model": "m", "messages": [user("hi")], **fields}
                )
                assert answer.status_code == 200, answer.text
                ids = answer.json().get("tokens") or stage.link.submitted[-1].prompt_ids
                found.append(bytes(ids).decode())
        return found

    assert on_stage(saying("x"), act, config, chats=True) == [text for _, text in cases]


TABLES = {
    "/v1/completions": completion_parser,
    "/v1/chat/completions": chat_parser,
    "/tokenize": tokenize_parser,
}
ODD: tuple[object, ...] = (17, "surely not", {"a": 1}, ["b"], True)


@pytest.mark.conforms(
    "completions.without effect", "chat.without effect", "tokenize.without effect"
)
@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, parser in TABLES.items() for name in parser.unused]
)
def test_taken_where_it_asks_for_nothing(server: Server, path: str, name: str) -> None:
    field = TABLES[path].unused[name]
    body = (
        BODIES[path]
        if name != "chat_template" or path != "/tokenize"
        else {"model": MODEL, "messages": [user("x")]}
    )
    for value in (None, *field.values, *ODD):
        answer = server.http.post(path, json={**body, name: value})
        requests_nothing = field.takes(value)
        if requests_nothing or field.is_ignored:
            assert answer.status_code == 200, value
            assert answer.headers.get("x-orca-ignored-fields") == (
                None if requests_nothing else name
            ), value
        else:
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == (name, "unsupported_parameter"), value
