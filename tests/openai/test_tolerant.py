"""Fields that mean nothing here break no client: they are ignored, named in a header and counted in a metric."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from orca_jax.serve.openai.errors import ApiError
from orca_jax.serve.openai.schema import PARSERS, chat_parser, completion_parser
from orca_jax.serve.openai.schema.nested import NESTED
from orca_jax.serve.openai.schema.parse import BodyParser
from orca_jax.serve.openai.schema.tolerant import NOTHING_IGNORED, Ignored
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.serve.played import Stage, call, chat, on_stage, saying, user

HEADER = "x-orca-ignored-fields"
IGNORING = ServerConfig(EngineConfig(model="m"), unknown_fields="ignore")

# As litellm 1.105 sends a message of this server back: it makes `provider_specific_fields` of `"refusal": null`.
FROM_LITELLM: dict[str, Any] = {
    "content": "hi",
    "role": "assistant",
    "tool_calls": None,
    "function_call": None,
    "provider_specific_fields": {"refusal": None},
}
FUNCTION = {"name": "clock", "arguments": "{}"}
TOOL_CALL = {"id": "c1", "type": "function", "function": FUNCTION}

ITEMS = (
    "InputMessage InputCall CallOutput CustomCall CustomOutput LocalShellCall LocalShellOutput PatchCall ShellCall "
    "ShellOutput ProgramCall ProgramOutput McpCall CodeCall FileSearchCall InputReasoning"
)
BLOCKS = "TextBlock DocumentBlock SearchResultBlock ToolUseBlock ToolResultBlock ThinkingBlock RedactedBlock"
NOTHING_ASKED: list[tuple[str, Any, str]] = [
    ("allowed_callers", ["direct"], "CustomTool"),
    ("annotations", [], "AssistantMessage TextPart OutputText"),
    ("async", False, "FlatFunction"),
    ("citations", [], f"AssistantMessage TextPart {BLOCKS}"),
    ("defer_loading", False, "CustomTool FlatFunction"),
    ("display", "summarized", "ThinkingConfig"),
    ("eager_input_streaming", True, "CustomTool"),
    ("images", [], "AssistantMessage"),
    ("include_obfuscation", False, "ResponseStreamOptions"),
    ("input_examples", [], "CustomTool"),
    ("is_error", False, "ToolMessage ToolResultBlock"),
    ("logprobs", [], "OutputText"),
    ("output_config", {}, "TurnMessage"),
    ("partial", False, "AssistantMessage"),
    ("prefix", False, "AssistantMessage"),
    ("status", "completed", ITEMS),
    ("verbosity", "medium", "TextSettings"),
]
"""A field, the value at which it asks for nothing, and the objects that have it."""


def parse_chat(*messages: dict[str, Any], **fields: Any) -> tuple[Any, Ignored]:
    return chat_parser.parse(
        json.dumps({"messages": [*messages] or [user("x")], **fields}).encode()
    )


def counted(stage: Stage) -> dict[str, int]:
    """The values of the metric, by field."""
    text = stage.observer.render().decode()
    found = re.findall(r'^orca_jax_ignored_fields_total\{field="(.*)"\} (\d+)', text, re.MULTILINE)
    return {name: int(count) for name, count in found}


@pytest.mark.conforms("chat.messages")
def test_a_message_that_litellm_sends_back() -> None:
    answer, link = chat(saying("x"), messages=[user("a"), FROM_LITELLM, user("b")])
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "messages.provider_specific_fields"
    assert b"refusal" not in bytes(link.submitted[0].prompt_ids)


def test_ignored_fields_are_named_and_counted_once_per_call() -> None:
    fields: dict[str, Any] = {
        "store": True,
        "verbosity": "low",
        "metadata": {"a": 1},
        "prompt_cache_key": "k",
    }
    messages = [
        {**FROM_LITELLM, "id": f"m{number}", "reasoning_details": []} for number in range(3)
    ]

    async def act(stage: Stage) -> tuple[list[httpx.Response], dict[str, int]]:
        body = {"model": "m", "messages": [*messages, user("x")], **fields}
        async with stage.http() as http:
            answers = [
                await http.post("/v1/chat/completions", json={**body, "stream": stream})
                for stream in (False, True)
            ]
            plain = await http.post("/v1/chat/completions", json={"messages": [user("x")]})
        return [*answers, plain], counted(stage)

    (whole, stream, plain), counts = on_stage(saying("x"), act, chats=True)
    named = {
        *fields,
        "messages.id",
        "messages.reasoning_details",
        "messages.provider_specific_fields",
    }
    assert (
        set(whole.headers[HEADER].split(", ")) == set(stream.headers[HEADER].split(", ")) == named
    )
    assert counts == dict.fromkeys(named, 2) and HEADER not in plain.headers


def test_completions_ignore_fields_too() -> None:
    answer, _ = call(saying("x"), service_tier="flex", cache_prompt=True, keep_alive="5m")
    assert answer.status_code == 200 and answer.headers[HEADER] == "service_tier, keep_alive"


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (
            {"role": "user", "content": "x", "id": "m1", "cache_control": {"type": "ephemeral"}},
            "id",
        ),
        (
            {"role": "assistant", "content": "x", "refusal": "no", "annotations": [1]},
            "refusal annotations",
        ),
        ({"role": "assistant", "content": "x", "annotations": [], "parsed": None}, ""),
        ({"role": "tool", "content": "x", "tool_call_id": "c1", "artifact": {"a": 1}}, "artifact"),
        (
            {"role": "user", "content": [{"type": "text", "text": "x", "index": 0}]},
            "content.index",
        ),
        ({"role": "assistant", "tool_calls": [{**TOOL_CALL, "index": 0}]}, "tool_calls.index"),
        (
            {
                "role": "assistant",
                "tool_calls": [{**TOOL_CALL, "function": {**FUNCTION, "parsed_arguments": {}}}],
            },
            "tool_calls.function.parsed_arguments",
        ),
    ],
)
def test_extra_keys_of_messages(message: dict[str, Any], names: str) -> None:
    request, ignored = parse_chat(message)
    assert ignored == Ignored(tuple(f"messages.{name}" for name in names.split()))
    assert len(request.messages) == 1


def test_values_that_ask_for_nothing_are_not_reported() -> None:
    expected = {
        (kind, name, repr(value)) for name, value, kinds in NOTHING_ASKED for kind in kinds.split()
    }
    fields = [
        (kind, name, field) for kind, unused in NESTED.items() for name, field in unused.items()
    ]
    assert {
        (kind, name, repr(value)) for kind, name, field in fields for value in field.values
    } == (expected)


def test_extra_keys_at_every_level() -> None:
    tool = {
        "type": "function",
        "strict": True,
        "function": {"name": "f", "cache_control": {}, "parameters": None},
    }
    response_format = {
        "type": "json_schema",
        "strict": True,
        "json_schema": {"schema": {}, "name": None},
    }
    _, ignored = parse_chat(tools=[tool, tool], response_format=response_format)
    assert ignored.known == (
        "tools.strict",
        "tools.function.cache_control",
        "response_format.strict",
    )


@pytest.mark.parametrize(
    "body",
    [
        {
            name: None
            for name in (*chat_parser.kind.__struct_fields__, *chat_parser.unused)
            if name != "messages"
        },
        {"no such field": None},
        {"stream": True, "stream_options": {"include_usage": None, "no such field": None}},
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "no such field": None},
                    "no such field": None,
                }
            ]
        },
        {"response_format": {"type": "json_object", "json_schema": None}},
        {"messages": [{"role": "user", "content": "x", "no such field": None, "name": None}]},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{**TOOL_CALL, "type": None, "no such field": None}],
                }
            ]
        },
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x", "no such field": None}]}
            ]
        },
    ],
)
def test_null_is_not_given_at_every_level(body: dict[str, Any]) -> None:
    _, ignored = chat_parser.parse(json.dumps({"messages": [user("x")], **body}).encode())
    assert ignored == NOTHING_IGNORED


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "temprature"),
    ({"messages": [{**user("x"), "images": ["x"]}]}, "messages[0].images"),
    ({"messages": [user("x"), {**FROM_LITELLM, "images": ["x"]}]}, "messages[1].images"),
    ({"messages": [{**FROM_LITELLM, "audio": {"id": "x"}}]}, "messages[0].audio"),
    ({"stream": True, "stream_options": {"chunk_size": 1}}, "stream_options.chunk_size"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "input_schema": {}}}]},
        "tools[0].function.input_schema",
    ),
]


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_the_rest_is_refused_or_ignored_by_flag(body: dict[str, Any], param: str) -> None:
    """`--unknown-fields ignore` takes unknown fields alone, and no known field at an unsupported value."""
    text = json.dumps({"messages": [user("x")], **body}).encode()
    with pytest.raises(ApiError) as refused:
        chat_parser.parse(text)
    assert refused.value.param == param
    if refused.value.code == "unsupported_parameter":
        with pytest.raises(ApiError, match="must be"):
            chat_parser.parse(text, ignores_unknown=True)
    else:
        assert (
            refused.value.code == "unknown_parameter"
            and "--unknown-fields ignore" in refused.value.message
        )
        _, ignored = chat_parser.parse(text, ignores_unknown=True)
        assert ignored.unknown == (re.sub(r"\[\d\]", "", param),)


def test_unknown_fields_in_header_and_metric() -> None:
    """Names of unknown fields are chosen by callers: the header is limited, and the metric has one label for all."""

    async def act(stage: Stage) -> tuple[httpx.Response, dict[str, int]]:
        names = ["top_z", "a\r\nb: c", "é" * 100, *(f"x{number}" for number in range(99))]
        body = {"model": "m", "prompt": "x", "store": True, **dict.fromkeys(names, 1)}
        async with stage.http() as http:
            return await http.post("/v1/completions", json=body), counted(stage)

    answer, counts = on_stage(saying("x"), act, IGNORING)
    assert answer.status_code == 200, answer.text
    names = answer.headers[HEADER].split(", ")
    assert names[:3] == ["store", "top_z", "a__b__c"] and names[-1] == "..." and len(names) == 33
    assert counts == {"store": 1, "other": 1}


BY_MEANING: list[tuple[dict[str, Any], str, object]] = [
    ({"max_tokens": 16.0}, "max_tokens", 16),
    ({"seed": -3.0}, "seed", -3),
    ({"max_tokens": -1}, "max_tokens", -1),
    ({"stop": list("abcdefgh")}, "stop", list("abcdefgh")),
    ({"stop_token_ids": [1.0, 2]}, "stop_token_ids", [1, 2]),
    ({"top_k": 1e3}, "top_k", 1000),
    ({"temperature": 1}, "temperature", 1),
]


@pytest.mark.parametrize(
    ("parser", "body"),
    [(chat_parser, {"messages": [user("x")]}), (completion_parser, {"prompt": "x"})],
)
@pytest.mark.parametrize(("fields", "name", "value"), BY_MEANING)
def test_values_are_taken_by_their_meaning(
    parser: BodyParser[Any], body: dict[str, Any], fields: dict[str, Any], name: str, value: object
) -> None:
    request, ignored = parser.parse(json.dumps({**body, **fields}).encode())
    assert getattr(request, name) == value and ignored == NOTHING_IGNORED
    assert type(getattr(request, name)) is type(value) or name == "temperature"


@pytest.mark.parametrize("value", ["16.5", "9007199254740993.0", "1e300", '"16"', "true", "[16]"])
def test_other_values_are_not_integers(value: str) -> None:
    with pytest.raises(ApiError) as refused:
        completion_parser.parse(b'{"prompt": "x", "seed": ' + value.encode() + b"}")
    assert refused.value.param == "seed"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_no_limit_is_the_rest_of_the_context(path: str) -> None:
    answer, link = call(saying("x"), path, max_tokens=-1, store=True)
    (submit,) = link.submitted
    assert answer.status_code == 200 and submit.params.max_tokens == 1024 - len(submit.prompt_ids)


def test_a_body_may_begin_with_a_mark_and_name_no_model() -> None:
    async def act(stage: Stage) -> list[int]:
        body = b'\xef\xbb\xbf{"prompt": "x"}'
        async with stage.http() as http:
            headers = {"content-type": "application/json"}
            paths = ("/v1/completions", "/v1/completions/")
            answers = [await http.post(path, content=body, headers=headers) for path in paths]
            answers += [await http.get(path) for path in ("/v1/models/", "/health/", "/none/")]
        assert answers[0].json()["model"] == "m"
        return [answer.status_code for answer in answers]

    assert on_stage(saying("x"), act) == [200, 200, 200, 200, 404]


@pytest.mark.conforms("chat.response_format")
def test_formats_without_a_name_or_with_a_schema_of_their_own() -> None:
    schema = {"properties": {"a": {"type": "integer"}}}
    formats: list[dict[str, Any]] = [
        {"type": "json_schema", "json_schema": {"schema": schema}},
        {
            "type": "json_schema",
            "json_schema": {"schema": schema, "name": "any name", "description": "d"},
        },
        {"type": "json_object", "schema": schema},
    ]
    for one in formats:
        structured = chat(saying("{}"), response_format=one)[1].submitted[0].params.structured
        assert (
            structured is not None
            and json.loads(structured.value)["properties"] == schema["properties"]
        ), one


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.conforms("chat.tool_choice", "chat.tools")
def test_allowed_tools_and_names_with_dots() -> None:
    tools = [tool("fs.read"), tool("fs.write"), tool("clock")]
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [tool("fs.read")]},
    }
    answer, link = chat(
        saying('[{"name": "fs.read", "arguments": {}}]'), tools=tools, tool_choice=choice
    )
    (made,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert made["function"]["name"] == "fs.read"
    structured = link.submitted[0].params.structured
    assert (
        structured is not None and "fs.read" in structured.value and "clock" not in structured.value
    )
    assert b"clock" not in bytes(link.submitted[0].prompt_ids), "the model sees no other tools"
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool("clock")]}}
    assert (
        chat(saying("x"), tools=tools, tool_choice=choice)[1].submitted[0].params.structured is None
    )
    _, link = chat(saying('[{"name": "clock", "arguments": {}}]'), tools=tools, tool_choice="any")
    assert link.submitted[0].params.structured is not None


@pytest.mark.conforms("chat.reasoning_effort", "chat.enable_thinking")
def test_fields_for_the_template_are_read_by_it_or_ignored(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ reasoning_effort }}|{{ messages[0].content }}", encoding="utf-8")
    config = ServerConfig(EngineConfig(model="m"), chat_template=str(template))
    fields: dict[str, Any] = {"reasoning_effort": "high", "enable_thinking": False}
    answer, link = chat(saying("x"), config, **fields)
    assert (
        bytes(link.submitted[0].prompt_ids) == b"high|x"
        and answer.headers[HEADER] == "enable_thinking"
    )
    answer, link = chat(
        saying("x"), config, **fields, chat_template_kwargs={"reasoning_effort": "low"}
    )
    assert bytes(link.submitted[0].prompt_ids) == b"low|x", "the more direct field wins"
    answer, _ = chat(saying("x"), **fields)
    assert answer.headers[HEADER] == "reasoning_effort, enable_thinking"


# Fields of chats in other servers and clients, by dialect. Each is honoured, ignored, or refused with a reason.
DIALECTS = {
    "OpenAI": "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens "
    "metadata modalities n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_retention "
    "reasoning_effort response_format safety_identifier seed service_tier stop store stream stream_options temperature "
    "tool_choice tools top_logprobs top_p user verbosity web_search_options",
    "Azure": "data_sources user_security_context",
    "vLLM": "use_beam_search top_k min_p repetition_penalty length_penalty stop_token_ids include_stop_str_in_output "
    "ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs "
    "allowed_token_ids bad_words echo add_generation_prompt continue_final_message add_special_tokens documents "
    "chat_template chat_template_kwargs mm_processor_kwargs media_io_kwargs structured_outputs guided_json "
    "guided_regex guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern priority request_id "
    "logits_processors return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs "
    "include_reasoning thinking_token_budget repetition_detection",
    "SGLang": "regex ebnf stop_regex no_stop_trim lora_path session_params separate_reasoning stream_reasoning rid "
    "extra_key return_hidden_states return_routed_experts custom_logit_processor custom_params data_parallel_rank",
    "LiteLLM and Anthropic": "provider_specific_fields thinking cache_control context_management mcp_servers container "
    "system stop_sequences",
    "Mistral": "random_seed safe_prompt prompt_mode prediction",
    "Groq": "citation_options compound_custom disable_tool_validation documents exclude_domains include_domains "
    "include_reasoning reasoning_format search_settings",
    "OpenRouter": "provider models route transforms plugins usage top_a session_id trace reasoning debug image_config",
    "Qwen, DeepSeek and xAI": "enable_thinking thinking_budget enable_search search_options thinking deferred "
    "search_parameters",
    "llama.cpp, Ollama and LM Studio": "cache_prompt id_slot keep_alive ttl draft_model timings_per_token "
    "return_progress n_predict repeat_penalty grammar json_schema typical_p tfs_z mirostat dynatemp_range "
    "xtc_probability dry_multiplier",
    "Fireworks": "context_length_exceeded_behavior prompt_truncate_len perf_metrics_in_response",
}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_fields_of_other_dialects_are_decided(dialect: str) -> None:
    known = {*chat_parser.kind.__struct_fields__, *chat_parser.unused}
    assert sorted(set(DIALECTS[dialect].split()) - known) == []
    assert all(field.reason for field in chat_parser.unused.values())


def test_nested_fields_are_of_objects_that_exist() -> None:
    document = json.loads(call_for_document())
    schemas = document["components"]["schemas"]
    assert set(NESTED) <= set(schemas)
    message = document["components"]["schemas"]["AssistantMessage"]
    assert message["additionalProperties"] == {"type": "null"}
    assert message["properties"]["provider_specific_fields"]["description"].startswith("Ignored")


@pytest.mark.parametrize("parser", PARSERS.values(), ids=PARSERS)
def test_no_field_with_an_effect_is_listed_as_unused(parser: BodyParser[Any]) -> None:
    """The document would call such a field ignored, as it did with the id of a tool call."""
    _, schemas = msgspec.json.schema_components([parser.kind])
    for name, schema in schemas.items():
        unused = parser.unused if name == parser.kind.__name__ else NESTED.get(name, {})
        assert sorted(set(unused) & set(schema.get("properties", ()))) == [], name


def call_for_document() -> bytes:
    async def act(stage: Stage) -> bytes:
        async with stage.http() as http:
            return (await http.get("/openapi.json")).content

    return on_stage(saying("x"), act)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("temprature", "unknown parameter: 'temprature'; did you mean temperature?; leave"),
        ("zzz", "unknown parameter: 'zzz'; leave"),
        ("temperature" * 100_000, "unknown parameter: 'temperature"),
    ],
)
def test_an_unknown_field_names_the_one_that_it_is_near(field: str, said: str) -> None:
    with pytest.raises(ApiError) as refused:
        completion_parser.parse(json.dumps({"prompt": "x", field: 1}).encode())
    assert refused.value.message.startswith(said)
    assert len(refused.value.message) < 300
