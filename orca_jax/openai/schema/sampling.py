"""Fields of both completions and chat completions: type, range and meaning; and the body of `POST /v1/completions`."""

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from orca_jax.openai.errors import ApiError
from orca_jax.openai.schema.limits import (
    DEFAULT_MAX_TOKENS,
    INT64,
    MAX_ALL_STOPS,
    MAX_ANSWERS,
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
from orca_jax.openai.schema.structured import ResponseFormat, StructuredOutputs
from orca_jax.request import MAX_LOGIT_BIAS, RANGES, TOKEN_ID, Range


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
BiasKeys = Meta(max_length=MAX_LOGIT_BIAS, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}})
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

    include_usage: Annotated[
        bool | None,
        Meta(
            description="Send a last chunk with the token counts and without choices; `usage` is `null` in all others."
        ),
    ] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="Send the counts so far in every chunk. Requires `include_usage`.")
    ] = None
    include_obfuscation: Annotated[
        bool | None, Meta(description="Only `false`: chunks are not padded to hide their length.")
    ] = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all bodies that ask for text. For every field, `null` means "not given"."""

    model: Annotated[str | None, Meta(description="One of the served model names. Default: the served model.")] = None

    temperature: Annotated[
        Annotated[float, within(RANGES["temperature"])] | None,
        Meta(
            description="Sampling temperature; 0 always takes the most probable token. Default: the model's "
            "`generation_config.json`, else 1."
        ),
    ] = None
    top_p: Annotated[
        Annotated[float, within(RANGES["top_p"])] | None,
        Meta(
            description="Sample from the smallest set of most probable tokens with at least this total probability. "
            "Default: the model's `generation_config.json`, else 1."
        ),
    ] = None
    top_k: Annotated[
        Annotated[int, within(RANGES["top_k"])] | None,
        Meta(
            description="Sample from the k most probable tokens; 0 or -1 for all. Default: the model's "
            "`generation_config.json`, else 0."
        ),
    ] = None
    min_p: Annotated[
        Annotated[float, within(RANGES["min_p"])] | None,
        Meta(
            description="Exclude tokens with less than this fraction of the highest token probability. Default: the "
            "model's `generation_config.json`, else 0."
        ),
    ] = None
    presence_penalty: Annotated[
        Penalty | None, Meta(description="Subtracted from the logit of every token generated so far. Default 0.")
    ] = None
    frequency_penalty: Annotated[
        Penalty | None,
        Meta(description="Subtracted from a token's logit once for each time it was generated. Default 0."),
    ] = None
    repetition_penalty: Annotated[
        Annotated[float, within(RANGES["repetition_penalty"])] | None,
        Meta(
            description="For tokens of the prompt and the answer: divides positive logits and multiplies negative "
            "ones. Default: the model's `generation_config.json`, else 1."
        ),
    ] = None
    seed: Annotated[
        Annotated[int, within(RANGES["seed"])] | None,
        Meta(
            description="The same seed gives the same draws. In float32 it gives the same tokens, independent of other "
            "requests; in bfloat16 and float16, and with pages in 8 bits, only in batches of the same shapes. Choice i "
            "of a prompt uses seed + i. Default: random."
        ),
    ] = None
    logit_bias: Annotated[
        Annotated[BIAS, BiasKeys] | None,
        Meta(description="Map of a token id (as a string) to a number added to its logit."),
    ] = None
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1)] | None,
        Meta(description="Only these ids are generated; list end tokens explicitly to allow them."),
    ] = None
    bad_words: Annotated[
        Annotated[list[Word], Meta(max_length=MAX_BAD_WORDS)] | None,
        Meta(description="Words that must not be generated."),
    ] = None

    stop: Annotated[
        StopString | StopStrings | None,
        Meta(
            description="Strings that end the text. The text ends before the first complete one. At most "
            f"{MAX_ALL_STOPS} characters in total."
        ),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, Meta(description="Keep the stop string at the end of the text.")
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None,
        Meta(description="Token ids that end the text, in addition to the model's end tokens."),
    ] = None
    ignore_eos: Annotated[bool | None, Meta(description="Do not end at the model's end tokens.")] = None
    min_tokens: Annotated[
        AnyTokenCount | None,
        Meta(description="Minimum number of generated tokens before an end token; at most `max_tokens`."),
    ] = None
    skip_special_tokens: Annotated[
        bool | None,
        Meta(
            description="Leave special tokens out of the text. Default true; always false if the model's own tool "
            "calls are parsed."
        ),
    ] = None

    add_special_tokens: Annotated[
        bool | None,
        Meta(description="Add the tokenizer's special tokens to the prompt. Default true, for chats false."),
    ] = None

    structured_outputs: Annotated[
        StructuredOutputs | None,
        Meta(description="Output format in vLLM's syntax: exactly one of its fields. The format is enforced."),
    ] = None

    stream: Annotated[bool | None, Meta(description="Send the answer in pieces, as server-sent events.")] = None
    request_id: Annotated[
        CallerId | None, Meta(description="Becomes part of the answer's `id`; also written to logs and traces.")
    ] = None
    queue_timeout: Annotated[
        Seconds | None,
        Meta(
            description="Maximum seconds until the first token, else 503 `queue_timeout`. The server's own limit still "
            "applies."
        ),
    ] = None
    timeout: Annotated[
        Seconds | None,
        Meta(
            description="Maximum seconds for the whole call, else 408 `timeout`. The server's own limit still applies."
        ),
    ] = None
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_NAME)] | None,
        Meta(description="Only calls with the same salt share prefix-cache entries."),
    ] = None

    priority: Annotated[
        Annotated[int, within(RANGES["priority"])] | None,
        Meta(
            description="Lower values run earlier. Values other than 0 require a server with "
            "`--scheduling-policy priority`."
        ),
    ] = None
    user: Annotated[
        Annotated[str, Meta(max_length=MAX_NAME)] | None,
        Meta(
            description="With `--scheduling-policy fair` and no API keys: calls of one user share one share of the "
            "engine. Otherwise ignored."
        ),
    ] = None

    def stops(self) -> list[str]:
        """The stop strings, as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionFields(SamplingFields, frozen=True, kw_only=True):
    """Base of completions and chats: fields of which other bodies have none, or another form."""

    n: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        Meta(description="Number of choices for each prompt. Default 1."),
    ] = None
    prompt_logprobs: Annotated[
        NumLogprobs | None,
        Meta(description="Log probabilities of the prompt, with this many most probable tokens. Not with `stream`."),
    ] = None
    return_token_ids: Annotated[bool | None, Meta(description="Also return `prompt_token_ids` and `token_ids`.")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=INT64)] | None,
        Meta(description="Keep only this many last tokens of the prompt; -1: as many as leave room for the answer."),
    ] = None
    response_format: Annotated[
        ResponseFormat | None, Meta(description="Output format in OpenAI's syntax. The format is enforced.")
    ] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Options of the stream. Requires `stream`.")] = (
        None
    )


PromptPart = str | list[int]
MaxIds = Meta(max_length=MAX_PROMPT_IDS)


class CompletionRequest(CompletionFields, frozen=True, kw_only=True):
    """A request for completions."""

    prompt: Annotated[
        str | Annotated[list[str | TokenId | Annotated[list[TokenId], MaxIds]], MaxIds],
        Meta(description=f"A string, a list of token ids, or a list of up to {MAX_PROMPTS} strings or lists of ids."),
    ]
    max_tokens: Annotated[
        TokenLimit | None,
        Meta(
            description="Maximum number of generated tokens; -1: the rest of the context. Default: the model's "
            "`generation_config.json`, else 16, and less if the context is too short. 0 only with `echo`."
        ),
    ] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None,
        Meta(
            description="Number of candidates for each prompt. The `n` candidates with the highest mean log "
            "probability are returned. Default `n`. Not with `stream`."
        ),
    ] = None
    echo: Annotated[bool | None, Meta(description="Put the prompt before the generated text.")] = None
    logprobs: Annotated[
        NumLogprobs | None,
        Meta(
            description="Return log probabilities of the generated tokens and of this many most probable ones; with "
            "`echo` also of the prompt's tokens."
        ),
    ] = None

    prompt_name: ClassVar[str] = "prompt"
    limit_name: ClassVar[str] = "max_tokens"
    default_limit: ClassVar[int | None] = DEFAULT_MAX_TOKENS

    @property
    def limit(self) -> int | None:
        """Maximum number of generated tokens; None: the default."""
        return self.max_tokens

    def prompts(self) -> list[PromptPart]:
        """The prompts, in order. Raises ApiError."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(part, int) for part in self.prompt):
            return [[part for part in self.prompt if isinstance(part, int)]]
        if not 1 <= len(self.prompt) <= MAX_PROMPTS:
            raise ApiError(400, f"prompt must contain 1 to {MAX_PROMPTS} prompts, got {len(self.prompt)}", "prompt")
        prompts = [part for part in self.prompt if not isinstance(part, int)]
        if len(prompts) < len(self.prompt) or len({type(part) for part in prompts}) > 1:
            raise ApiError(
                400,
                "prompt must be a string, a list of token ids, a list of strings, or a list of lists of token ids",
                "prompt",
            )
        return prompts

    def candidates(self, num_prompts: int) -> int:
        """Number of engine requests for each prompt. Raises ApiError."""
        n = self.n or 1
        candidates = self.best_of or n
        if candidates < n:
            raise ApiError(400, f"best_of must be at least n, which is {n}", "best_of")
        if candidates > n and self.stream:
            raise ApiError(400, "best_of cannot be streamed: the best texts are known only at the end", "best_of")
        if candidates * num_prompts > MAX_ANSWERS:
            message = (
                f"{num_prompts} prompts with {candidates} candidates each exceed the limit of {MAX_ANSWERS} in one call"
            )
            raise ApiError(400, message, "best_of" if self.best_of else "n")
        return candidates
