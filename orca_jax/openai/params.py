"""From the fields of a call to what the engine is asked for."""

from dataclasses import dataclass
from typing import Any

from orca_jax.errors import RequestError
from orca_jax.link.wire import Submit
from orca_jax.openai.errors import ApiError
from orca_jax.openai.model import Model, Prompt, Service
from orca_jax.openai.schema.sampling import SamplingFields
from orca_jax.request import SamplingParams, StructuredOutput, Urgency
from orca_jax.text.bad_words import bad_word_ids

# Fields that are the engine's own under the same names.
PLAIN = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "logit_bias", "allowed_token_ids", "stop_token_ids", "ignore_eos", "min_tokens"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a call asks for beside its plain fields, in the engine's words, and the caller's names of it."""

    max_tokens: int | None  # as the caller said; None: `default`, which gives way to a long prompt
    default: int | None = None  # None: all that the context leaves
    logprobs: int | None = None  # of generated tokens
    prompt_logprobs: int | None = None
    structured: StructuredOutput | None = None
    cache_salt: str = ""
    limit_name: str = "max_tokens"
    prompt_name: str = "prompt"


def check_fields(service: Service, call: SamplingFields) -> None:
    """What the tables cannot say, since it depends on the model. Raises ApiError."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        service.check_ids(list(getattr(call, name) or ()), name)
    if call.truncate_prompt_tokens == 0:
        raise ApiError(400, "truncate_prompt_tokens must leave at least one token", "truncate_prompt_tokens")
    if call.priority and service.config.engine.scheduling_policy != "priority":
        message = "priority must be 0 here: the server does not run with --scheduling-policy priority"
        raise ApiError(400, message, "priority", code="unsupported_parameter")


def urgency_of(call: SamplingFields, caller: str | None) -> Urgency:
    """A call's place among others. Its key says whose it is; without keys what it says of itself has to do."""
    return Urgency(call.priority or 0, call.user or "" if caller is None else caller, call.timeout)


def salt_of(service: Service, call: SamplingFields, caller: str | None) -> str:
    """With whom a call shares prefixes. Digests of keys are equally long, so no salt can pass for another key's."""
    salt = call.cache_salt or ""
    return salt if caller is None or not service.config.cache_salt_per_key else caller + salt


def check_logprobs(service: Service, count: int | None, param: str) -> None:
    """Raises ApiError if these are more than the operator allows."""
    most = service.config.max_logprobs
    if count is not None and count > most:
        raise ApiError(400, f"{param} must be at most {most} on this server, got {count}", param)


def truncated(prompt: Prompt, call: SamplingFields, max_tokens: int | None, context: int) -> Prompt:
    """The prompt's last tokens, where the call asks for no more."""
    keep = call.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep < 0:
        keep = max(1, context - max(1, max_tokens or 0))
    return prompt if len(prompt.ids) <= keep else Prompt(None, prompt.ids[-keep:])


def engine_requests(
    service: Service,
    call: SamplingFields,
    prompts: list[Prompt],
    candidates: int,
    wanted: Wanted,
    urgency: Urgency,
) -> list[Submit]:
    """`candidates` requests for each prompt, which differ in their seeds. Raises ApiError."""
    model = service.model
    given = {name: value for name in PLAIN if (value := getattr(call, name)) is not None}
    defaults = {name: value for name, value in model.defaults.items() if name != "max_tokens"}
    fields: dict[str, Any] = defaults | given
    requests: list[Submit] = []
    made: dict[tuple[int, int], SamplingParams] = {}
    try:
        if call.allowed_token_ids is not None:
            fields["allowed_token_ids"] = tuple(dict.fromkeys(call.allowed_token_ids))
        if call.bad_words:
            fields["bad_token_ids"] = bad_word_ids(model.tokenizer, call.bad_words)
        for prompt in prompts:
            max_tokens = _max_tokens(model, prompt, wanted)
            for choice in range(candidates):
                key = (max_tokens, choice if call.seed is not None else 0)
                if key not in made:  # a batch of prompts shares most of them
                    made[key] = _params(fields, *key, wanted)
                requests.append(Submit(service.client.new_request_id(), prompt.ids, made[key], urgency))
    except RequestError as error:
        raise ApiError(400, error.message, _caller_name(error.param, wanted)) from None
    return requests


def _params(fields: dict[str, Any], max_tokens: int, choice: int, wanted: Wanted) -> SamplingParams:
    seed = fields.get("seed")
    if choice and isinstance(seed, int):
        fields = {**fields, "seed": (seed + choice + 2**63) % 2**64 - 2**63}
    # Values are typed by the tables of fields; the mapping only leaves out what was not given.
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=wanted.logprobs,
        prompt_logprobs=wanted.prompt_logprobs,
        structured=wanted.structured,
        cache_salt=wanted.cache_salt,
        **fields,
    )


def _max_tokens(model: Model, prompt: Prompt, wanted: Wanted) -> int:
    """Tokens to be generated at most. Only a default gives way to a short context. Raises ApiError."""
    count = len(prompt.ids)
    room = model.context - count
    start = f"this model's maximum context length is {model.context} tokens, and"
    if count == 0:
        raise ApiError(400, f"{wanted.prompt_name} must hold at least one token", wanted.prompt_name)
    if room < 1:
        message = f"{start} the prompt has {count}; at least one has to be left for the answer"
        raise ApiError(400, message, wanted.prompt_name, code="context_length_exceeded")
    if wanted.max_tokens is None:
        default = model.defaults.get("max_tokens", wanted.default)
        return room if default is None else min(int(default), room)
    if wanted.max_tokens > room:
        message = (
            f"{start} you asked for {count + wanted.max_tokens}: {count} in the prompt, "
            f"{wanted.max_tokens} as {wanted.limit_name}"
        )
        raise ApiError(400, message, wanted.limit_name, code="context_length_exceeded")
    return max(1, wanted.max_tokens)  # 0 scores the prompt, and what is generated beside is dropped


def _caller_name(param: str | None, wanted: Wanted) -> str | None:
    return wanted.limit_name if param == "max_tokens" else param
