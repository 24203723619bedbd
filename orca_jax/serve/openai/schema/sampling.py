"""Fields of both completions and chat completions, with type and range; and the body of `POST /v1/completions`.

`fields.toml` says what each field means; a description is here if it has a limit in its text.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from orca_jax.serve.openai.schema.cache.fields import (
    AgentHint,
    CacheControl,
    KvHints,
    PromptCacheOptions,
    Retained,
    SessionName,
)
from orca_jax.serve.openai.schema.limits import (
    INT64,
    MAX_ALL_STOPS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_NAME,
    MAX_PROMPT_IDS,
    MAX_PROMPTS,
    MAX_SECONDS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
)
from orca_jax.serve.openai.schema.structured import ResponseFormat, StructuredOutputs
from orca_jax.values.request import MAX_LOGIT_BIAS, RANGES, TOKEN_ID, Range


def within(known: Range, **schema: Any) -> Meta:
    """A range as a msgspec constraint. `schema` holds further keys for the JSON schema."""
    if known.excludes_low:
        return Meta(gt=known.low, le=known.high, extra_json_schema=schema or None)
    return Meta(ge=known.low, le=known.high, extra_json_schema=schema or None)


# `components.py` replaces each `x-limit` by a limit of the model, once the server has loaded it.
TokenId = Annotated[int, within(TOKEN_ID, **{"x-limit": "vocab_size"})]
AnyTokenCount = Annotated[int, Meta(ge=0, le=INT64, extra_json_schema={"x-limit": "context"})]
UNLIMITED = -1  # as a maximum of tokens, as in llama.cpp: the rest of the context
TokenLimit = Annotated[int, Meta(ge=UNLIMITED, le=INT64)]
BiasKeys = Meta(
    max_length=MAX_LOGIT_BIAS,
    extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}},
)
BIAS = dict[TokenId, Annotated[float, within(RANGES["logit_bias"])]]
NumLogprobs = Annotated[int, within(RANGES["logprobs"])]
Penalty = Annotated[float, within(RANGES["presence_penalty"])]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
Word = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
CallerId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SchedulingHints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a scheduler of your own may read of a call (docs/own_scheduler.md)."""

    program: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    weight: Annotated[float, within(RANGES["weight"])] = 1.0
    ttft: Seconds | None = None
    tpot: Seconds | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all bodies that ask for text. For every field, `null` means "not given"."""

    model: str | None = None

    temperature: Annotated[float, within(RANGES["temperature"])] | None = None
    top_p: Annotated[float, within(RANGES["top_p"])] | None = None
    top_k: Annotated[int, within(RANGES["top_k"])] | None = None
    min_p: Annotated[float, within(RANGES["min_p"])] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, within(RANGES["repetition_penalty"])] | None = None
    seed: Annotated[int, within(RANGES["seed"])] | None = None
    logit_bias: Annotated[BIAS, BiasKeys] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    bad_words: Annotated[list[Word], Meta(max_length=MAX_BAD_WORDS)] | None = None

    stop: Annotated[
        StopString | StopStrings | None,
        Meta(
            description="Strings that end the text. The text ends before the first complete one. At most "
            f"{MAX_ALL_STOPS} characters in total."
        ),
    ] = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: AnyTokenCount | None = None
    skip_special_tokens: bool | None = None

    add_special_tokens: bool | None = None

    structured_outputs: StructuredOutputs | None = None

    stream: bool | None = None
    request_id: CallerId | None = None
    queue_timeout: Seconds | None = None
    timeout: Seconds | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)] | None = None

    prompt_cache_key: SessionName | None = None
    prompt_cache_retention: Retained | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    cache_control: CacheControl | None = None
    kv_hints: KvHints | None = None
    agent_hint: AgentHint | None = None

    priority: Annotated[int, within(RANGES["priority"])] | None = None
    user: Annotated[str, Meta(max_length=MAX_NAME)] | None = None
    vllm_xargs: SchedulingHints | None = None


class CompletionFields(SamplingFields, frozen=True, kw_only=True):
    """Base of completions and chats: fields of which other bodies have none, or another form."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    response_format: ResponseFormat | None = None
    stream_options: StreamOptions | None = None


PromptPart = str | list[int]
MaxIds = Meta(max_length=MAX_PROMPT_IDS)
Prompts = Annotated[
    str | Annotated[list[str | TokenId | Annotated[list[TokenId], MaxIds]], MaxIds],
    Meta(
        description=f"A string, a list of token ids, or a list of up to {MAX_PROMPTS} strings or lists of ids."
    ),
]


class CompletionRequest(CompletionFields, frozen=True, kw_only=True):
    """A request for completions."""

    prompt: Prompts
    max_tokens: TokenLimit | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
