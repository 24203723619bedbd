"""The request body of `POST /v1/chat/completions`."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from orca_jax.serve.openai.schema.cache.fields import CacheBreakpoint, CacheControl
from orca_jax.serve.openai.schema.limits import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS
from orca_jax.serve.openai.schema.sampling import CompletionFields, NumLogprobs, TokenLimit
from orca_jax.serve.openai.schema.structured import JsonObject, Name, TypedObject


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text part of a message. Image, audio and file parts are not supported."""

    # not a tag: in a struct outside a union, msgspec would make the tag optional
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


AnswerLimit = Annotated[TokenLimit, Meta(extra_json_schema={"not": {"const": 0}})]
Content = str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]


class SystemMessage(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="system"
):
    """Instructions for the model."""

    content: Content
    name: str | None = None
    cache_control: CacheControl | None = None


class DeveloperMessage(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="developer"
):
    """OpenAI's newer name for a system message. Chat templates receive it with the role `system`."""

    content: Content
    name: str | None = None
    cache_control: CacheControl | None = None


class UserMessage(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="user"
):
    """A message of the user."""

    content: Content
    name: str | None = None
    cache_control: CacheControl | None = None


class CalledFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The function of an earlier call, with its arguments as JSON text."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call of the model, earlier in the conversation."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class AssistantMessage(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="assistant"
):
    """An earlier answer of the model."""

    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[CalledTool], Meta(max_length=MAX_TOOLS)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    cache_control: CacheControl | None = None


class ToolMessage(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="role", tag="tool"
):
    """The result of a tool call."""

    content: Content
    tool_call_id: str
    name: str | None = None
    cache_control: CacheControl | None = None


ChatMessage = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionDefinition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool. Functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl | None = None


class NamedFunction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The name of one of `tools`."""

    name: Name


class NamedTool(TypedObject, frozen=True, tag="function"):
    """The tool that the model must call."""

    function: NamedFunction


class AllowedList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Some of `tools`, and the rule for their calls."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(TypedObject, frozen=True, tag="allowed_tools"):
    """A choice among some of `tools`. The model sees no others."""

    allowed_tools: AllowedList


class ChatRequest(CompletionFields, frozen=True, kw_only=True):
    """A request for chat completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: AnswerLimit | None = None
    max_tokens: AnswerLimit | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    echo: bool | None = None
