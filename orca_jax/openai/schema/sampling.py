"""The fields that completions and chat completions have in common: type, range, meaning."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from orca_jax.openai.schema.limits import (
    INT64,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_NAME,
    MAX_SECONDS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
)
from orca_jax.openai.schema.structured import ResponseFormat, StructuredOutputs
from orca_jax.request import RANGES, TOKEN_ID, Range
from orca_jax.step import MAX_LOGIT_BIAS


def within(known: Range, **schema: Any) -> Meta:
    """A range as msgspec checks it; `schema` joins it in the document."""
    if known.excludes_low:
        return Meta(gt=known.low, le=known.high, extra_json_schema=schema or None)
    return Meta(ge=known.low, le=known.high, extra_json_schema=schema or None)


# The marks become the model's own limits in the document of a server that knows its model (`components.py`).
TokenId = Annotated[int, within(TOKEN_ID, **{"x-limit": "vocab_size"})]
TokenCount = Annotated[int, Meta(ge=1, le=INT64, extra_json_schema={"x-limit": "context"})]
AnyTokenCount = Annotated[int, Meta(ge=0, le=INT64, extra_json_schema={"x-limit": "context"})]
BiasKeys = Meta(max_length=MAX_LOGIT_BIAS, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}})
NumLogprobs = Annotated[int, within(RANGES["logprobs"])]
Penalty = Annotated[float, within(RANGES["presence_penalty"])]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)]
Word = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
CallerId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: Annotated[
        bool | None, Meta(description="A last chunk without choices has the token counts; all others have `null`.")
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="With `include_usage`: every chunk has the counts so far.")
    ] = None
    include_obfuscation: Annotated[
        bool | None, Meta(description="Only `false`: chunks are not padded to hide their lengths.")
    ] = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what a client may send; `null` means "not given" everywhere."""

    model: Annotated[str, Meta(description="One of the served names.")]

    temperature: Annotated[
        Annotated[float, within(RANGES["temperature"])] | None,
        Meta(description="Default 1, or the model directory's; 0 takes the most probable token."),
    ] = None
    top_p: Annotated[
        Annotated[float, within(RANGES["top_p"])] | None,
        Meta(description="Smallest set of tokens with at least this probability. Default 1, or the directory's."),
    ] = None
    top_k: Annotated[
        Annotated[int, within(RANGES["top_k"])] | None,
        Meta(description="The k most probable tokens; 0 and -1 are all. Default 0, or the directory's."),
    ] = None
    min_p: Annotated[
        Annotated[float, within(RANGES["min_p"])] | None,
        Meta(description="Tokens with at least this share of the most probable one's probability."),
    ] = None
    presence_penalty: Annotated[
        Penalty | None, Meta(description="Taken from the logit of every token that was generated before.")
    ] = None
    frequency_penalty: Annotated[Penalty | None, Meta(description="The same, times how often it was generated.")] = None
    repetition_penalty: Annotated[
        Annotated[float, within(RANGES["repetition_penalty"])] | None,
        Meta(description="Divides positive and multiplies negative logits of tokens in prompt and answer."),
    ] = None
    seed: Annotated[
        Annotated[int, within(RANGES["seed"])] | None,
        Meta(
            description="The same seed gives the same tokens whoever else is served; choice i of a prompt draws with "
            "seed + i. Default: drawn."
        ),
    ] = None
    logit_bias: Annotated[
        Annotated[dict[TokenId, Annotated[float, within(RANGES["logit_bias"])]], BiasKeys] | None,
        Meta(description="Token id, as a string, to what is added to its logit."),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1)] | None,
        Meta(description="No other token is generated, nor the end token unless listed."),
    ] = None
    bad_words: Annotated[
        Annotated[list[Word], Meta(max_length=MAX_BAD_WORDS)] | None, Meta(description="Words that are not generated.")
    ] = None

    n: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None, Meta(description="Choices for each prompt. Default 1.")
    ] = None
    stop: Annotated[
        StopString | StopStrings | None,
        Meta(description="The text ends before the first of these that becomes complete."),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, Meta(description="Keep the stop string at the end of the text.")
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None,
        Meta(description="Ids that end the text, beside the model's own end tokens."),
    ] = None
    ignore_eos: Annotated[bool | None, Meta(description="Do not end at the model's own end tokens.")] = None
    min_tokens: Annotated[
        AnyTokenCount | None,
        Meta(description="Generated tokens before an end token may come; at most `max_tokens`."),
    ] = None
    skip_special_tokens: Annotated[
        bool | None,
        Meta(description="Leave special tokens out of the text. Default true, but false where tool calls are read."),
    ] = None

    prompt_logprobs: Annotated[
        NumLogprobs | None,
        Meta(description="Log probabilities of the prompt's tokens, and so many most probable ones. Not in streams."),
    ] = None
    return_token_ids: Annotated[
        bool | None, Meta(description="Answer with `prompt_token_ids` and `token_ids` as well.")
    ] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=INT64)] | None,
        Meta(description="Keep at most so many tokens, the last ones; -1: as many as leave room for the answer."),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        Meta(description="Put the tokenizer's special tokens around the prompt. Default: true, for chats false."),
    ] = None

    response_format: Annotated[
        ResponseFormat | None, Meta(description="OpenAI's way to ask for JSON; what it asks for is enforced.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, Meta(description="vLLM's way to say what the text must match; one of its fields.")
    ] = None

    stream: Annotated[bool | None, Meta(description="Answer in pieces, as server-sent events.")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Only with `stream`.")] = None
    request_id: Annotated[
        CallerId | None, Meta(description="Becomes part of the answer's `id`, and stands in logs and traces.")
    ] = None
    queue_timeout: Annotated[
        Seconds | None,
        Meta(description="Seconds to the first token, else 503 `queue_timeout`. Ours; the server's limit holds too."),
    ] = None
    timeout: Annotated[
        Seconds | None,
        Meta(description="Seconds for the whole call, else 408 `timeout`. Ours; the server's limit holds too."),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_NAME)] | None,
        Meta(description="Where prefixes are reused, only calls of the same salt share them."),
    ] = None

    priority: Annotated[
        Annotated[int, within(RANGES["priority"])] | None,
        Meta(description="Lower is sooner. Other than 0 only where the server has `--scheduling-policy priority`."),
    ] = None
    user: Annotated[
        Annotated[str, Meta(max_length=MAX_NAME)] | None,
        Meta(
            description="Where the server has `--scheduling-policy fair` and no API keys, calls of one user have one "
            "share. Else for the client's own books."
        ),
    ] = None

    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []
