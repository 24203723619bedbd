"""Conversion of the fields of a call into engine requests."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from orca_jax.errors import RequestError
from orca_jax.link.wire import Submit
from orca_jax.openai.errors import ApiError, PromptTooLong
from orca_jax.openai.model import Model, Prompt, Service
from orca_jax.openai.schema.chat import ChatRequest
from orca_jax.openai.schema.embeddings import EmbeddingRequest
from orca_jax.openai.schema.limits import MAX_ALL_STOPS
from orca_jax.openai.schema.sampling import UNLIMITED, CompletionRequest, SamplingFields
from orca_jax.request import SamplingParams, Urgency, candidate_seed
from orca_jax.text.bad_words import bad_word_ids

# Fields of a call with the name of a field in `SamplingParams`, but another form or another way there.
_CONVERTED = frozenset({"n", "max_tokens", "logprobs", "prompt_logprobs", "stop", "bad_words", "cache_salt"}) | {
    "include_stop_str_in_output",
    "skip_special_tokens",
    "structured_outputs",
}
PLAIN = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name in SamplingFields.__struct_fields__ and field.name not in _CONVERTED
)
"""Fields of a call with the same name and form in `SamplingParams`."""

MAX_NAMED = 50  # wrong ids that an error names

type CompletionCall = CompletionRequest | ChatRequest
type AnyCall = CompletionCall | EmbeddingRequest


def check_fields(service: Service, call: CompletionCall, counts: Sequence[str]) -> None:
    """Check the fields that depend on the model or on the server's settings.

    `counts` names the fields with a number of log probabilities, in the order of the checks.

    Raises:
        ApiError: a field is wrong.
    """
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        check_ids(service.model, list(getattr(call, name) or ()), name)
    if sum(map(len, call.stops())) > MAX_ALL_STOPS:
        raise ApiError(400, f"stop must have at most {MAX_ALL_STOPS} characters in total", "stop")
    if call.truncate_prompt_tokens == 0:
        raise ApiError(400, "truncate_prompt_tokens must leave at least one token", "truncate_prompt_tokens")
    if (call.min_tokens or 0) >= service.model.context:
        message = f"min_tokens must be less than the context of {service.model.context} tokens, got {call.min_tokens}"
        raise ApiError(400, message, "min_tokens")
    check_priority(service, call)
    most = service.config.max_logprobs
    for name in counts:
        count = getattr(call, name)
        if count is not None and count > most:
            raise ApiError(400, f"{name} must be at most {most} on this server, got {count}", name)


def check_priority(service: Service, call: AnyCall) -> None:
    """Refuse a priority on a server without priorities. Raises ApiError."""
    if call.priority and service.config.engine.scheduling_policy != "priority":
        message = "priority must be 0: this server does not run with --scheduling-policy priority"
        raise ApiError(400, message, "priority", code="unsupported_parameter")


def check_ids(model: Model, ids: Sequence[int], param: str) -> None:
    """Raise ApiError if an id is not in the model's vocabulary."""
    vocab_size = model.vocab_size
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = [i for i in ids if not 0 <= i < vocab_size][:MAX_NAMED]
        named = f"id{'s' if len(wrong) > 1 else ''} {', '.join(map(str, wrong))}"
        raise ApiError(400, f"{param} contains {named}, but the model's vocabulary has only {vocab_size} ids", param)


def urgency_of(call: AnyCall, caller: str | None) -> Urgency:
    """Inputs of schedulers. The tenant is the API key, or the field `user` on a server without keys."""
    hints = None if isinstance(call, EmbeddingRequest) else call.vllm_xargs
    tenant = call.user or "" if caller is None else caller
    return Urgency(call.priority or 0, tenant, call.timeout, **({} if hints is None else msgspec.structs.asdict(hints)))


def salt_of(service: Service, call: AnyCall, caller: str | None) -> str:
    """The salt of a call's prefix-cache entries. Key digests have one length, so no salt can imitate another key."""
    salt = call.cache_salt or ""
    return salt if caller is None or not service.config.cache_salt_per_key else caller + salt


def truncated(prompt: Prompt, call: CompletionCall, context: int) -> Prompt:
    """The prompt, or its last tokens if the call sets `truncate_prompt_tokens`.

    Raises:
        ApiError: the prompt shall leave room for an answer that fills the context.
    """
    keep = call.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep < 0:
        limit = max(1, call.limit or 0)
        if limit >= context:
            message = (
                f"{call.limit_name} must be less than the context of {context} tokens with truncate_prompt_tokens: -1, "
                f"which leaves room for it, got {limit}"
            )
            raise ApiError(400, message, call.limit_name, code="context_length_exceeded")
        keep = context - limit
    return prompt if len(prompt.ids) <= keep else Prompt(None, prompt.ids[-keep:])


async def bad_words_of(service: Service, call: CompletionCall) -> tuple[tuple[int, ...], ...]:
    """The ids of the bad words of a call. Raises ApiError."""
    words, tokenizer = call.bad_words, service.model.tokenizer
    if not words:
        return ()
    return await service.encoding(lambda: bad_word_ids(tokenizer, words), "bad_words", sum(map(len, words)))


def engine_requests(
    service: Service,
    call: CompletionCall,
    prompts: Sequence[Prompt],
    candidates: int,
    urgency: Urgency,
    **fields: Any,
) -> list[Submit]:
    """`candidates` requests for each prompt, with different seeds.

    `fields` are the fields of `SamplingParams` with another name or form in the call.

    Raises:
        ApiError: a field is wrong, or a prompt is too long.
    """
    model = service.model
    defaults = {name: value for name, value in model.defaults.items() if name != "max_tokens"}
    given = {name: value for name in PLAIN if (value := getattr(call, name)) is not None}
    fields = defaults | given | fields
    requests: list[Submit] = []
    adapter = service.adapter_of(call.model)
    made: dict[tuple[int, int], SamplingParams] = {}
    try:
        if call.allowed_token_ids is not None:
            fields["allowed_token_ids"] = tuple(dict.fromkeys(call.allowed_token_ids))
        for prompt in prompts:
            max_tokens = _max_tokens(model, len(prompt.ids), call)
            for choice in range(candidates):
                key = (max_tokens, choice if call.seed is not None else 0)
                if key not in made:  # several prompts mostly share their parameters
                    made[key] = _params(fields, *key)
                requests.append(Submit(service.client.new_request_id(), prompt.ids, made[key], urgency, adapter))
    except RequestError as error:
        param = call.limit_name if error.param == "max_tokens" else error.param
        raise ApiError(400, error.message, param) from None
    return requests


def _params(fields: Mapping[str, Any], max_tokens: int, choice: int) -> SamplingParams:
    """The parameters of one candidate. The types of all values were checked when the body was parsed."""
    seed = fields.get("seed")
    if choice and isinstance(seed, int):
        fields = {**fields, "seed": candidate_seed(seed, choice)}
    return SamplingParams(max_tokens=max_tokens, **fields)


def room_of(model: Model, num_prompt: int, call: CompletionCall) -> int:
    """The number of tokens that a prompt leaves for the answer. Raises ApiError if there is none."""
    room = model.context - num_prompt
    if num_prompt == 0:
        raise ApiError(400, f"{call.prompt_name} must contain at least one token", call.prompt_name)
    if room < 1:
        message = (
            f"this model's maximum context length is {model.context} tokens, and the prompt has {num_prompt}; "
            "at least one must be left for the answer"
        )
        raise PromptTooLong(message, call.prompt_name, num_prompt, model.context - 1)
    return room


def cut_limit(call: CompletionCall, requests: Sequence[Submit]) -> int | None:
    """The limit of generated tokens if that of the call is larger than the rest of the context, else None."""
    limit = min([request.params.max_tokens for request in requests])
    return limit if call.limit is not None and call.limit > limit else None


def _max_tokens(model: Model, num_prompt: int, call: CompletionCall) -> int:
    """The maximum number of generated tokens, reduced to the rest of the context. Raises ApiError."""
    room = room_of(model, num_prompt, call)
    limit = model.defaults.get("max_tokens", call.default_limit) if call.limit is None else call.limit
    if limit is None or limit == UNLIMITED:
        return room
    return min(max(1, int(limit)), room)  # 0 only scores the prompt; the one token that is generated is dropped
