"""What goes out, in OpenAI's shapes. A key that is UNSET is left out."""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"]
PromptLogprobs = list[dict[str, dict[str, Any]] | None]


class PromptDetails(msgspec.Struct, frozen=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int  # of pages that earlier requests computed


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one call; a prompt counts once, whatever `n`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | msgspec.UnsetType = msgspec.UNSET  # where some were cached


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists, one entry for every token; `null` for a text's very first one."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One text, or one more piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """An answer, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most probable tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A generated token, and the most probable ones at its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry for every token."""

    content: list[TokenLogprob]
    refusal: None = None


class Function(msgspec.Struct, frozen=True):
    """A call's function, with its arguments as JSON text."""

    name: str
    arguments: str


class ToolCallAnswer(msgspec.Struct, frozen=True):
    """A call that the model makes."""

    id: str
    function: Function
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct, frozen=True):
    """The name, once, and arguments to be joined."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    """The same in a stream: whole, or begun and then continued by further ones, which have neither id nor name."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AnswerMessage(msgspec.Struct, frozen=True):
    """What the model says."""

    content: str | None
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """All answers of one call."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """One more piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """One chunk of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True):
    """One model of `GET /v1/models`."""

    id: str
    created: int
    max_model_len: int  # vLLM's extension
    object: Literal["model"] = "model"
    owned_by: str = "orca-jax"


class ModelList(msgspec.Struct, frozen=True):
    """`GET /v1/models`."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Version(msgspec.Struct, frozen=True):
    """`GET /version`."""

    version: str


class Live(msgspec.Struct, frozen=True):
    """`GET /live`."""

    status: str


class EngineHealth(msgspec.Struct, frozen=True):
    """`GET /ready` and `GET /health`."""

    status: str
    running: int
    waiting: int


class Generated(msgspec.Struct, frozen=True):
    """`GET /health_generate`."""

    status: str
    error: str | UnsetType = UNSET


class ServerLoad(msgspec.Struct, frozen=True):
    """`GET /load`."""

    server_load: int


ServerLoad.__name__ = "Load"  # the name of its component in `/openapi.json`
