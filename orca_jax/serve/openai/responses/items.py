"""Responses and their items as they are sent, in OpenAI's format. A field that is UNSET is left out of the JSON."""

from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from orca_jax.serve.openai.schema.answers import CacheExplanation, CompletionDetails, TokenLogprob
from orca_jax.serve.openai.schema.input_items import (
    InputMessage,
    InputReasoning,
    InputText,
    OutputText,
    ReasoningText,
    RefusalPart,
)
from orca_jax.serve.openai.schema.responses import (
    FlatAllowedTools,
    FlatNamedTool,
    InputItem,
)

type ItemStatus = Literal["in_progress", "completed", "incomplete"]


class FunctionName(NamedTuple):
    """The name of a function, and of its namespace if it has one."""

    name: str
    namespace: str | None = None

    @property
    def shown(self) -> str:
        """The name that the model sees."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"


class ShownText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    logprobs: list[TokenLogprob] = []
    annotations: list[Any] = []


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    content: list[ShownText]
    status: ItemStatus
    role: Literal["assistant"] = "assistant"


class CallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of a function, with its arguments as JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """What the model wrote before its answer."""

    id: str
    content: list[ReasoningText]
    status: ItemStatus
    summary: list[ReasoningText] = []


type OutputItem = MessageItem | CallItem | ReasoningItem


class InputDetails(msgspec.Struct, frozen=True):
    """The source of the prompt's tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """Token counts of one response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: CompletionDetails
    total_tokens: int
    cache_explanation: CacheExplanation | UnsetType = UNSET


class ResponseFault(msgspec.Struct, frozen=True):
    """The error of a failed response."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """The reason of an incomplete response."""

    reason: Literal["max_output_tokens"]


class ShownFunction(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """A function of the call."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ShownNamespace(msgspec.Struct, frozen=True, tag_field="type", tag="namespace"):
    """A namespace of the call."""

    name: str
    description: str
    tools: list[ShownFunction]


class RawMessage(msgspec.Struct, frozen=True):
    """A prompt or an answer as the model has it."""

    message: str
    tokens: list[int]
    type: Literal["raw_message_tokens"] = "raw_message_tokens"


class ModelResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it is sent."""

    id: str
    object: Literal["response"] = "response"
    created_at: int  # seconds since 1970
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    background: Literal[False] = False
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[MessageItem | CallItem | ReasoningItem] = []
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, str | None]
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | FlatAllowedTools
    tools: list[ShownFunction | ShownNamespace]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    input_messages: list[RawMessage] | UnsetType = UNSET
    output_messages: list[RawMessage] | UnsetType = UNSET


class DeletedResponse(msgspec.Struct, frozen=True):
    """The answer to a deletion."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseItemList(msgspec.Struct, frozen=True):
    """A page of the input items of a response."""

    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
    object: Literal["list"] = "list"


class InputTokens(msgspec.Struct, frozen=True):
    """The number of tokens of an input."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


def shown_item(item: InputItem) -> dict[str, Any]:
    """An input item with an id, as `input_items` returns it."""
    match item:
        case InputMessage(role, content):
            kind = OutputText if role == "assistant" else InputText
            parts = [kind(content)] if isinstance(content, str) else content
            return {
                "id": item.id,
                "type": "message",
                "role": role,
                "status": "completed",
                "content": [_shown_part(part, is_answer=role == "assistant") for part in parts],
            }
        case InputReasoning(content, summary):
            texts = {
                "summary": msgspec.to_builtins(summary or []),
                "content": msgspec.to_builtins(content or []),
            }
            return {"id": item.id, "type": "reasoning", "status": "completed", **texts}
        case _:
            given = {
                name: value
                for name, value in msgspec.to_builtins(item).items()
                if value is not None
            }
            return {**given, "status": "completed"}


def _shown_part(part: InputText | OutputText | RefusalPart, *, is_answer: bool) -> dict[str, Any]:
    if isinstance(part, RefusalPart):
        return {"type": "refusal", "refusal": part.refusal}
    if is_answer:
        return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
    return {"type": "input_text", "text": part.text}
