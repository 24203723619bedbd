"""`POST /tokenize`, `POST /detokenize` and the routes of rendering, in vLLM's shapes."""

from typing import Annotated

import msgspec
from msgspec import Meta

from orca_jax.serve.openai.schema.chat import ChatMessage, Tool
from orca_jax.serve.openai.schema.limits import MAX_MESSAGES, MAX_PROMPT_IDS, MAX_TOOLS
from orca_jax.serve.openai.schema.sampling import TokenId
from orca_jax.serve.openai.schema.structured import JsonObject


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text or a conversation to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_IDS)]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids of a prompt that a call would generate from: the part of vLLM's answer that routers read."""

    request_id: str
    token_ids: list[int]
    features: None = None  # of images; there are none
    model: str


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The text of token ids or of a conversation, including special tokens."""

    prompt: str
