"""`POST /tokenize`, `POST /detokenize` and the routes of rendering, in vLLM's shapes."""

from typing import Annotated

import msgspec
from msgspec import Meta

from orca_jax.openai.schema.chat import ChatMessage, Tool
from orca_jax.openai.schema.limits import MAX_MESSAGES, MAX_PROMPT_IDS, MAX_TOOLS
from orca_jax.openai.schema.sampling import TokenId
from orca_jax.openai.schema.structured import JsonObject


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A text or a conversation to tokenize."""

    model: Annotated[str | None, Meta(description="One of the served model names.")] = None
    prompt: Annotated[str | None, Meta(description="A text. Give either this or `messages`.")] = None
    messages: Annotated[
        Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None,
        Meta(description="A conversation. The chat template turns it into a prompt."),
    ] = None
    tools: Annotated[
        Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None, Meta(description="Only with `messages`.")
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="Add the tokenizer's special tokens to the text. Default true, for `messages` false."),
    ] = None
    return_token_strs: Annotated[bool | None, Meta(description="Also return the text of every token.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="Only with `messages`. Default true.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="Only with `messages`. Default false.")] = None
    chat_template_kwargs: Annotated[JsonObject | None, Meta(description="Only with `messages`.")] = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids to turn into text."""

    model: Annotated[str | None, Meta(description="One of the served model names.")] = None
    tokens: Annotated[
        list[TokenId], Meta(max_length=MAX_PROMPT_IDS, description="Token ids of the model's vocabulary.")
    ]


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
