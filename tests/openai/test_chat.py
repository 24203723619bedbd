"""`/v1/chat/completions`: through OpenAI's own client on the toy, and word by word with a played engine."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pydantic
import pytest

from orca_jax.values.request import StructuredOutput
from tests.openai.chats import MISTRAL, TOOLS, checked, deltas, error_of, message_of, only
from tests.serve.played import (
    READY,
    News,
    Stage,
    call,
    chat,
    events,
    on_stage,
    saying,
    update,
    user,
)
from tests.serve.running import MODEL, Server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


@pytest.mark.conforms("POST /v1/chat/completions", "chat.model", "chat.messages")
@pytest.mark.conforms("chat.max_completion_tokens")
def test_openai_client(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "developer", "content": "Be brief."}, user("Hello")]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, max_completion_tokens=12, seed=1
    )
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
    assert choice.message.refusal is None and choice.finish_reason in ("stop", "length")
    assert answer.usage is not None and 1 <= answer.usage.completion_tokens <= 12
    again: Any = [*messages, choice.message.model_dump(), user("Go on")]
    assert client.chat.completions.create(model=MODEL, messages=again, max_tokens=2).choices, (
        "a message may come back"
    )


@pytest.mark.conforms(
    "chat.stream", "chat.logprobs", "chat.top_logprobs", "chat.n", "chat.stream_options"
)
def test_openai_client_stream_equals_the_whole(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [user("stream")],
        "max_tokens": 60,
        "seed": 4,
        "n": 2,
    }
    fields |= {"logprobs": True, "top_logprobs": 2, "extra_body": {"ignore_eos": True}}
    whole = client.chat.completions.create(**fields)
    texts, ends, counts = ["", ""], [None, None], [0, 0]
    with client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, last = stream
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index] = choice.finish_reason
        counts[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
        assert chunk.usage is None
    assert texts == [choice.message.content for choice in whole.choices] and texts[0] != texts[1]
    assert ends == ["length", "length"] and counts == [60, 60]
    # the second may find its prompt in the cache
    counted = {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert last.choices == [] and last.usage.model_dump(include=counted) == whole.usage.model_dump(
        include=counted
    )
    first = whole.choices[0].logprobs.content[0]
    assert len(first.top_logprobs) == 2 and first.logprob <= first.top_logprobs[0].logprob <= 0
    assert bytes(first.bytes or []).decode(
        "utf-8", "replace"
    ) == first.token or first.token.startswith("bytes:")


@pytest.mark.conforms("chat.tools", "chat.tool_choice")
def test_openai_client_forced_calls(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": MODEL,
        "messages": [user("Weather?")],
        "tools": TOOLS,
        "max_tokens": 400,
        "seed": 1,  # a text may have any length
    }
    quiet = {"logit_bias": {str(blank): -100 for blank in b" \t\n\r"}}
    answer = client.chat.completions.create(**fields, tool_choice="required", **quiet)
    calls = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and calls
    assert all(call.function.name in ("weather", "clock") and call.id for call in calls)
    named: Any = {"type": "function", "function": {"name": "weather"}}
    answer = client.chat.completions.create(**fields, tool_choice=named, **quiet)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in (
        "Oslo",
        "Rome",
    )


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_openai_client_sends_parsed_messages_back(client: openai.OpenAI) -> None:
    class Answer(pydantic.BaseModel):
        number: int

    quiet: Any = {
        "logit_bias": {str(blank): -100 for blank in b" \t\n\r"},
        "max_tokens": 400,
        "model": MODEL,
    }
    quiet["seed"] = 1  # a number may have any length
    first = (
        client.chat.completions.parse(messages=[user("?")], response_format=Answer, **quiet)
        .choices[0]
        .message
    )
    assert first.parsed is not None and str(first.parsed.number) in (first.content or "")
    strict: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    messages: Any = [user("?"), first, user("!")]
    second = client.chat.completions.parse(
        messages=messages, tools=strict, tool_choice="required", **quiet
    )
    (call, *_) = second.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments["city"] in ("Oslo", "Rome")
    messages += [
        second.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "rain"},
    ]
    named: Any = {"type": "function", "function": {"name": "weather"}}
    with client.chat.completions.stream(
        messages=messages, tools=strict, tool_choice=named, **quiet
    ) as stream:
        third = stream.get_final_completion().choices[0].message
    assert third.tool_calls
    assert (
        client.chat.completions.create(messages=[*messages, third], **quiet)
        .choices[0]
        .message.content
        is not None
    )


@pytest.mark.conforms("chat.structured_outputs", "chat.response_format")
@pytest.mark.parametrize(
    ("fields", "matches"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        (
            {"structured_outputs": {"regex": "[ab]{3}c"}},
            lambda text: len(text) == 4 and text.endswith("c"),
        ),
        (
            {"structured_outputs": {"grammar": 'start: "x" ("y" | "z")'}},
            lambda text: text in ("xy", "xz"),
        ),
        (
            {"structured_outputs": {"json": {"enum": [1, 2]}}},
            lambda text: json.loads(text) in (1, 2),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"const": "k"}},
                }
            },
            lambda text: json.loads(text) == "k",
        ),
    ],
)
def test_structured_answers(server: Server, fields: dict[str, Any], matches: Any) -> None:
    body = {"model": MODEL, "messages": [user("?")], "max_tokens": 64, "seed": 2, **fields}
    answer = message_of(server.http.post("/v1/chat/completions", json=body))
    assert matches(answer["content"]), answer


def test_a_bad_schema_is_a_400_also_in_a_stream(server: Server) -> None:
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"type": "no such type"}},
    }
    body = {"model": MODEL, "messages": [user("?")], "response_format": schema}
    for stream in (False, True):
        answer = server.http.post("/v1/chat/completions", json={**body, "stream": stream})
        assert error_of(answer)["param"] == "response_format"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
        "tool_choice",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": TOOLS, "tool_choice": only("no")}, "tool_choice"),
    ({"tool_choice": only("weather")}, "tool_choice"),
    ({"tools": [TOOLS[0], TOOLS[0]], "tool_choice": "required"}, "tools"),
    (
        {"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "oracle", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
            ]
        },
        "messages[0].content[0].type",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"echo": True}, "echo"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"data_sources": [{"type": "azure_search"}]}, "data_sources"),
    ({"safe_prompt": True}, "safe_prompt"),
    ({"guided_json": {}}, "guided_json"),
    ({"enable_thinking": "yes"}, "enable_thinking"),
    (
        {"messages": [{"role": "assistant", "content": "x", "function_call": {}}]},
        "messages[0].function_call",
    ),
    ({"messages": [{"role": "assistant", "content": "x", "prefix": True}]}, "messages[0].prefix"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
    ),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_chats(server: Server, number: int) -> None:
    fields, param = BAD[number]
    body = {"model": MODEL, "messages": [user("x")], **fields}
    assert error_of(server.http.post("/v1/chat/completions", json=body))["param"] == param


def test_what_clients_send_and_means_nothing_here(server: Server) -> None:
    fields: dict[str, Any] = {"user": "me", "metadata": {}, "store": False, "service_tier": "auto"}
    fields |= {"parallel_tool_calls": True, "modalities": ["text"], "unknown": None}
    fields |= {
        "function_call": "none",
        "reasoning_effort": None,
        "cache_salt": "s",
        "priority": 0,
        "tools": [],
    }
    body = {"model": MODEL, "messages": [user("x")], "max_tokens": 1, **fields}
    answer = checked(server.http.post("/v1/chat/completions", json=body))
    assert answer.status_code == 200 and "x-orca-ignored-fields" not in answer.headers


@pytest.mark.conforms("chat.messages", "tokenize.messages")
def test_messages_reach_the_template_as_it_knows_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "rules"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "refusal": None,
            "annotations": [],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "c1"},
    ]

    async def act(stage: Stage) -> Sequence[int]:
        async with stage.http() as http:
            body = {"model": "m", "messages": messages, "max_tokens": 1}
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
            ids = (await http.post("/tokenize", json={"messages": messages})).json()["tokens"]
            assert ids == stage.link.submitted[0].prompt_ids
        return stage.link.submitted[0].prompt_ids

    text = bytes(on_stage(saying("x", reason="length"), act, chats=True)).decode()
    assert "system" in text and "developer" not in text and "one\ntwo" in text and "noon" in text


@pytest.mark.conforms("chat.echo", "chat.continue_final_message", "chat.add_generation_prompt")
def test_a_last_message_that_goes_on() -> None:
    messages = [user("Count."), {"role": "assistant", "content": "one, two"}]
    fields = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    answer, link = chat(saying(", three"), **fields)
    assert (
        bytes(link.submitted[0].prompt_ids).endswith(b"one, two")
        and message_of(answer)["content"] == ", three"
    )
    answer, _ = chat(saying(", three"), echo=True, **fields)
    assert message_of(answer)["content"] == "one, two, three"
    answer, _ = chat(saying(", three"), echo=True, stream=True, **fields)
    assert "".join(delta.get("content", "") for delta in deltas(answer)) == "one, two, three"


def test_a_model_without_template() -> None:
    async def act(stage: Stage) -> httpx.Response:
        async with stage.http() as http:
            return await http.post(
                "/v1/chat/completions", json={"model": "m", "messages": [user("x")]}
            )

    error = error_of(on_stage(saying("x"), act))
    assert error["param"] == "messages" and "--chat-template" in error["message"]


@pytest.mark.conforms("chat.skip_special_tokens")
def test_special_tokens_are_seen_where_calls_may_begin_with_one() -> None:
    def script(submit: Any) -> list[News]:
        return [update(submit, 65, 256, 66), update(submit, finish_reason="length")]

    assert message_of(chat(script)[0])["content"] == "AB"
    assert message_of(chat(script, skip_special_tokens=False)[0])["content"] == "A<|end|>B"
    assert message_of(chat(script, MISTRAL, tools=TOOLS)[0])["content"] == "A<|end|>B"


@pytest.mark.conforms("chat.return_token_ids", "chat.stream_options")
def test_ids_and_continuous_usage_in_a_stream() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer, link = chat(
        saying("ab", "c"), stream=True, stream_options=options, return_token_ids=True
    )
    chunks = events(checked(answer))
    assert chunks[0]["prompt_token_ids"] == link.submitted[0].prompt_ids
    assert [
        i for chunk in chunks for one in chunk["choices"] for i in one.get("token_ids", ())
    ] == [*b"abc", 256]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 4 and chunks[-1]["choices"] == []


@pytest.mark.conforms("chat.stream_options")
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuous_usage_counts_what_was_sent(path: str) -> None:
    """Tokens count with the chunk that has their text: not with the role, nor while their text is held back."""

    def script(submit: Any) -> list[News]:
        spelled = "é".encode()
        return [
            update(submit, spelled[0]),
            update(submit, spelled[1], 65),
            update(submit, 66, 67, finish_reason="length"),
        ]

    options = {"include_usage": True, "continuous_usage_stats": True}
    answer, _ = call(script, path, stream=True, stream_options=options, n=2)
    sent = ["", ""]
    for chunk in events(checked(answer))[:-1]:
        (choice,) = chunk["choices"]
        sent[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        usage = chunk["usage"]
        assert usage["completion_tokens"] == sum(len(text.encode()) for text in sent), chunk
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert sent == ["éABC", "éABC"] and events(answer)[-1]["usage"]["completion_tokens"] == 10


def test_structured_fields_reach_the_engine() -> None:
    _, link = chat(saying("{}"), response_format={"type": "json_object"})
    assert link.submitted[0].params.structured == StructuredOutput("json_object")
    _, link = chat(
        saying("{}"), response_format={"type": "text"}, structured_outputs={"json": '{"const": 1}'}
    )
    assert link.submitted[0].params.structured == StructuredOutput("json_schema", '{"const":1}')
    for bad in ({}, {"regex": "a", "choice": ["b"]}, {"json_object": False}, {"choice": []}):
        assert error_of(chat(saying("x"), structured_outputs=bad)[0])["param"].startswith(
            "structured_outputs"
        )
    assert READY.tokenizer == "byte"
