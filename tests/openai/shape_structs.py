"""OpenAI's shapes as structs: a key that OpenAI's document requires has no default, and an unknown key is an error."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

Count = Annotated[int, Meta(ge=0)]
Logprob = Annotated[float, Meta(le=1e-6)]
Name = Annotated[str, Meta(min_length=1)]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
Omissible = UnsetType


class ShapeError(AssertionError):
    """An answer that is not in OpenAI's shape; the message says where."""


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base: what is not named here must not be there."""


class ErrorBody(Shape, frozen=True):
    message: Name
    type: Name
    param: str | None
    code: str | None  # never a number


class ErrorEnvelope(Shape, frozen=True):
    error: ErrorBody


class Usage(Shape, frozen=True):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: dict[str, Count | None] | Omissible | None = UNSET
    completion_tokens_details: dict[str, Count | None] | Omissible | None = UNSET


class CompletionLogprobs(Shape, frozen=True):
    tokens: list[str]
    token_logprobs: list[Logprob | None]  # null: the first token of all has nothing before it
    top_logprobs: list[dict[str, Logprob] | None] | None
    text_offset: list[Count]


PromptLogprobs = list[dict[str, dict[str, Any]] | None] | Omissible | None


class Chosen(Shape, frozen=True, kw_only=True):
    index: Count
    # vLLM's extensions, each only where it was asked for
    stop_reason: int | str | Omissible | None = UNSET
    token_ids: list[Count] | Omissible | None = UNSET


class Answer(Shape, frozen=True, kw_only=True):
    id: Name
    created: Count
    model: Name
    system_fingerprint: str | Omissible | None = UNSET


class ChatAnswer(Answer, frozen=True, kw_only=True):
    service_tier: str | Omissible | None = UNSET
    prompt_logprobs: PromptLogprobs = UNSET
    prompt_token_ids: list[Count] | Omissible | None = UNSET


class CompletionChoice(Chosen, frozen=True, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "content_filter"] | None
    prompt_token_ids: list[Count] | Omissible | None = UNSET
    prompt_logprobs: PromptLogprobs = UNSET


class Completion(Answer, frozen=True, kw_only=True):
    """An answer and a chunk: OpenAI gives them one shape."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | Omissible | None = UNSET


class TopLogprob(Shape, frozen=True):
    token: str
    logprob: Logprob
    bytes: list[Annotated[int, Meta(ge=0, le=255)]] | None


class TokenLogprob(Shape, frozen=True):
    token: str
    logprob: Logprob
    bytes: list[Annotated[int, Meta(ge=0, le=255)]] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape, frozen=True):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class Function(Shape, frozen=True):
    name: Name
    arguments: str  # JSON as text


class ToolCall(Shape, frozen=True):
    id: Name
    type: Literal["function"]
    function: Function


class Message(Shape, frozen=True):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: Annotated[list[ToolCall], Meta(min_length=1)] | Omissible = UNSET
    reasoning: Name | Omissible = UNSET  # vLLM's extensions
    reasoning_content: Name | Omissible = UNSET
    annotations: list[dict[str, Any]] | Omissible = UNSET


class ChatChoice(Chosen, frozen=True, kw_only=True):
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(ChatAnswer, frozen=True, kw_only=True):
    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Meta(min_length=1)]
    usage: Usage


class FunctionDelta(Shape, frozen=True):
    name: Name | Omissible = UNSET
    arguments: str | Omissible = UNSET


class ToolCallDelta(Shape, frozen=True):
    index: Count
    id: Name | Omissible = UNSET
    type: Literal["function"] | Omissible = UNSET
    function: FunctionDelta | Omissible = UNSET


class Delta(Shape, frozen=True):
    role: Literal["assistant"] | Omissible = UNSET
    content: str | Omissible | None = UNSET
    refusal: str | Omissible | None = UNSET
    reasoning: Name | Omissible = UNSET
    reasoning_content: Name | Omissible = UNSET
    tool_calls: Annotated[list[ToolCallDelta], Meta(min_length=1)] | Omissible = UNSET


class ChatChunkChoice(Chosen, frozen=True, kw_only=True):
    delta: Delta
    finish_reason: FinishReason | None
    logprobs: ChatLogprobs | Omissible | None = UNSET


class ChatChunk(ChatAnswer, frozen=True, kw_only=True):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | Omissible | None = UNSET


class ModelCard(Shape, frozen=True):
    id: Name
    object: Literal["model"]
    created: Count
    owned_by: Name
    max_model_len: Count | Omissible = UNSET  # vLLM's extension
    decision_labels: dict[str, Count] | Omissible = UNSET  # docs/typed_decisions.md


class ModelList(Shape, frozen=True):
    object: Literal["list"]
    data: list[ModelCard]
    models: list[dict[str, str]] | Omissible = UNSET  # TypeSafe's list of the same models


class SystemOneFault(Shape, frozen=True):
    loc: list[str | int]
    msg: Name
    type: Name


class SystemOneRefusal(Shape, frozen=True):
    error_type: Name
    message: Name


class SystemOneError(Shape, frozen=True):
    """An error of TypeSafe's `/v1/systemone`."""

    detail: list[SystemOneFault] | SystemOneRefusal


class Tokens(Shape, frozen=True):
    """vLLM's `/tokenize`."""

    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | Omissible | None = UNSET


class Text(Shape, frozen=True):
    """vLLM's `/detokenize`."""

    prompt: str


def decode[T](kind: type[T], data: bytes, where: str) -> T:
    """JSON of exactly this shape. Raises ShapeError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ShapeError(f"{where}: {error} in {data[:300]!r}") from None


def require(holds: object, message: str) -> None:
    """Raise ShapeError unless it holds."""
    if not holds:
        raise ShapeError(message)
