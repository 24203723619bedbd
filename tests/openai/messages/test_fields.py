"""Fields of `/v1/messages`: those of chats reach the engine; all of Anthropic's are honoured, ignored or refused."""

import typing
from collections.abc import Iterator
from typing import Any

import anthropic.types as sdk
import anthropic.types.beta as beta
import httpx
import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params

from orca_jax.serve.openai.schema import messages as tables
from orca_jax.serve.openai.schema import messages_parser
from orca_jax.serve.openai.schema.nested import NESTED
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from tests.openai.messages.talks import MESSAGES, TOOLS, Talk, talk
from tests.openai.test_parameters import PASSED_ON
from tests.serve.played import saying, user

OF_HEADERS = {"betas"}  # the SDK sends it as a header
NESTED_TYPES: dict[str, type[msgspec.Struct]] = {
    "TextBlockParam": tables.TextBlock,
    "DocumentBlockParam": tables.DocumentBlock,
    "PlainTextSourceParam": tables.PlainSource,
    "ContentBlockSourceParam": tables.ContentSource,
    "SearchResultBlockParam": tables.SearchResultBlock,
    "ToolUseBlockParam": tables.ToolUseBlock,
    "ToolResultBlockParam": tables.ToolResultBlock,
    "ThinkingBlockParam": tables.ThinkingBlock,
    "RedactedThinkingBlockParam": tables.RedactedBlock,
    "ToolParam": tables.CustomTool,
    "ToolChoiceToolParam": tables.MessagesToolChoice,
    "ToolChoiceAnyParam": tables.MessagesToolChoice,
    "ToolChoiceAutoParam": tables.MessagesToolChoice,
    "ToolChoiceNoneParam": tables.MessagesToolChoice,
    "ThinkingConfigEnabledParam": tables.ThinkingConfig,
    "ThinkingConfigAdaptiveParam": tables.ThinkingConfig,
    "ThinkingConfigBetweenToolsParam": tables.ThinkingConfig,
    "ThinkingConfigDisabledParam": tables.ThinkingConfig,
    "OutputConfigParam": tables.OutputConfig,
    "JSONOutputFormatParam": tables.OutputSchema,
    "UserMessageParam": tables.TurnMessage,
    "AssistantMessageParam": tables.TurnMessage,
    "SystemMessageParam": tables.TurnMessage,
}


def fields_of(kind: Any) -> set[str]:
    """The fields of a typed dictionary with those of its bases, which the SDK lists there too."""
    return set(typing.get_type_hints(kind, include_extras=True))


@pytest.mark.parametrize(
    "kind",
    [
        message_create_params.MessageCreateParamsNonStreaming,
        message_create_params.MessageCreateParamsStreaming,
        beta_create_params.MessageCreateParamsNonStreaming,
        beta_create_params.MessageCreateParamsStreaming,
        message_count_tokens_params.MessageCountTokensParams,
        beta_count_params.MessageCountTokensParams,
    ],
    ids=lambda kind: f"{kind.__module__}.{kind.__name__}",
)
def test_all_fields_of_the_sdk_are_in_the_tables(kind: Any) -> None:
    known = {*messages_parser.kind.__struct_fields__, *messages_parser.unused}
    fields = fields_of(kind)
    assert {"messages", "model", "system", "tools"} <= fields, "the fields were found"
    assert fields - OF_HEADERS - known == set()


def nested_types() -> Iterator[tuple[str, type[msgspec.Struct], Any]]:
    for name, table in NESTED_TYPES.items():
        yield name, table, getattr(sdk, name)
        yield f"Beta{name}", table, getattr(beta, f"Beta{name}", None) or getattr(sdk, name)


@pytest.mark.parametrize(
    ("name", "table", "kind"),
    list(nested_types()),
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_all_fields_of_objects_are_in_the_tables(
    name: str, table: type[msgspec.Struct], kind: Any
) -> None:
    known = {
        *table.__struct_fields__,
        *NESTED.get(table.__name__, {}),
        table.__struct_config__.tag_field,
    }
    fields = fields_of(kind)
    assert fields and fields - known == set()


@pytest.mark.conforms("messages.temperature", "messages.top_p", "messages.top_k", "messages.min_p")
@pytest.mark.conforms(
    "messages.presence_penalty", "messages.frequency_penalty", "messages.repetition_penalty"
)
@pytest.mark.conforms(
    "messages.seed", "messages.logit_bias", "messages.allowed_token_ids", "messages.stop_token_ids"
)
@pytest.mark.conforms("messages.ignore_eos", "messages.min_tokens", "messages.structured_outputs")
@pytest.mark.conforms(
    "messages.include_stop_str_in_output", "messages.bad_words", "messages.add_special_tokens"
)
@pytest.mark.conforms(
    "messages.request_id", "messages.cache_salt", "messages.priority", "messages.user"
)
@pytest.mark.conforms(
    "messages.skip_special_tokens",
    "messages.queue_timeout",
    "messages.timeout",
    "messages.vllm_xargs",
)
def test_the_fields_of_chats_reach_the_engine() -> None:
    more = {
        "bad_words": ["no"],
        "structured_outputs": {"choice": ["a"]},
        "cache_salt": "s",
        "priority": 3,
        "user": "u",
        "timeout": 9.0,
        "queue_timeout": 8.0,
        "add_special_tokens": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "stop": ["e"],
        "vllm_xargs": {"program": "p", "weight": 2},
    }
    config = ServerConfig(EngineConfig(model="m", scheduler="tests.policy.turns:Reading"))

    async def act(found: Talk) -> None:
        async def told(path: str, fields: dict[str, Any]) -> tuple[Any, str]:
            body = {"model": "m", "messages": [user("x")], "max_tokens": 50, **fields}
            answer = await found.http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            whole = answer.json()
            text = (
                whole["content"][0]["text"]
                if "content" in whole
                else whole["choices"][0]["message"]["content"]
            )
            last = found.link.submitted[-1]
            return (last.prompt_ids, last.params, last.urgency), text

        for fields in (
            *({name: value} for name, value, _ in PASSED_ON),
            *({k: v} for k, v in more.items()),
        ):
            plain, chat = await told(MESSAGES, fields), await told("/v1/chat/completions", fields)
            assert plain == chat, fields
        named = await found.post(request_id="mine")
        assert named.json()["id"] == "msg_mine"

    talk(act, saying("Fine."), config)


@pytest.mark.conforms("messages.without effect")
def test_what_cannot_change_the_answer_is_taken_and_named() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    block = {"type": "text", "text": "x", **mark}
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {}, **mark}
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [block],
        "is_error": True,
        **mark,
    }
    tool = {
        **TOOLS[0],
        **mark,
        "input_examples": [{}],
        "defer_loading": True,
        "eager_input_streaming": False,
    }
    fields: dict[str, Any] = {
        **mark,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, block],
        "messages": [
            user("x"),
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ],
        "tools": [
            {**tool, "type": "custom"},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "metadata": {"user_id": "u"},
        "service_tier": "priority",
        "context_management": {"edits": []},
        "container": None,
        "inference_geo": "eu",
        "speed": "fast",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "mcp_servers": [],
    }

    async def act(found: Talk) -> httpx.Response:
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}
        return await found.post(f"{MESSAGES}?beta=true", headers=headers, **fields)

    answer = talk(act, config=ServerConfig(EngineConfig(model="m"), tool_call_parser="hermes"))
    assert answer.status_code == 200, answer.text
    named = set(answer.headers["x-orca-ignored-fields"].split(", "))
    assert named >= {"cache_control", "system.cache_control", "messages.content.cache_control"}
    assert named >= {"messages.content.is_error", "tools.input_examples", "tools.defer_loading"}
    assert named >= {"metadata", "service_tier", "context_management", "inference_geo", "speed"}
    assert named >= {
        "anthropic-version",
        "anthropic-beta",
        "thinking.budget_tokens",
        "tools.web_search_20250305",
    }
    assert named >= {"system.x-anthropic-billing-header", "tools.eager_input_streaming"}
    assert "container" not in named and "mcp_servers" not in named


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"compaction": {"type": "x"}}, "compaction"),
        ({"nonsense": 1}, "nonsense"),
        ({"max_completion_tokens": 5}, "use max_tokens"),
        ({"response_format": {"type": "text"}}, "output_config.format"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "any"}, "tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tool_choice",
        ),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"temperature": 3}, "temperature"),
        ({"system": 5}, "system"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    async def act(found: Talk) -> httpx.Response:
        return await found.post(**fields)

    answer = talk(act)
    assert answer.status_code == 400 and name in answer.json()["error"]["message"], answer.text
