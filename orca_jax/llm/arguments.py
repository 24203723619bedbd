"""Checks and conversions of the arguments of `LLM` and `AsyncLLM`."""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from types import NoneType
from typing import Any, cast

from orca_jax.assembly.choices import choices_of
from orca_jax.flags.vllm import has_no_effect, named_value, own_setting
from orca_jax.text.bad_words import engine_params
from orca_jax.text.tokenizer import Tokenizer, check_characters
from orca_jax.text.work_threads import WorkThreads
from orca_jax.values.checks import unknown_name
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError, RequestError
from orca_jax.values.lora_request import LoRARequest
from orca_jax.values.request import DEFAULT_URGENCY, REST_OF_CONTEXT, SamplingParams, Urgency
from orca_jax.values.step import SpannedPrompt

logger = logging.getLogger(__name__)

PlainPrompt = str | Sequence[int]
"""A text, or token ids with or without vector spans."""

PromptInput = PlainPrompt | Mapping[str, Any]
"""A prompt as in vLLM: plain, or a mapping with one of `_FIELDS`."""

_FILLED = frozenset({"priority", "predicted"})
"""What schedulers can read of the calls of `LLM` and `AsyncLLM`, and of a predictor."""

_FIELDS = {"prompt": str, "prompt_token_ids": list | tuple}


def check_version(version: int | None) -> None:
    """Check the number of new weights. Raises RequestError; `param` is "version"."""
    if version is not None and (type(version) is not int or not 0 <= version < 2**63):
        raise RequestError(
            f"version must be an integer from 0 on, got {version!r}", param="version"
        )


def as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Return a list of prompts; one alone counts as a list of one. Raises RequestError."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be a string, a list of token ids, a dict, or a list of these, not {type(prompts).__name__}"
        )
    if prompts and all(isinstance(part, int) for part in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[PromptInput], prompts))


def urgencies(priority: Sequence[int] | None, count: int, *, has_priorities: bool) -> list[Urgency]:
    """Return the urgency of each of `count` prompts. Raises RequestError; `param` is "priority"."""
    if priority is None:
        return [DEFAULT_URGENCY] * count
    if len(priority) != count:
        raise RequestError(
            f"{len(priority)} priorities for {count} prompts; give one for each prompt", "priority"
        )
    if any(priority) and not has_priorities:
        message = (
            'priority must be 0, since this LLM was not created with scheduling_policy="priority"'
        )
        raise RequestError(message, param="priority")
    return [Urgency(one) for one in priority]


def plain_prompt(prompt: object) -> PlainPrompt:
    """Return the text or the ids of a `PromptInput`. Raises RequestError; `param` is "prompt"."""
    if not isinstance(prompt, str | list | tuple | Mapping | SpannedPrompt):
        message = (
            f"a prompt must be a string, a list of token ids or a dict, not {type(prompt).__name__}"
        )
        raise RequestError(message, "prompt")
    if not isinstance(prompt, Mapping):
        return prompt
    for name, types in _FIELDS.items():
        if list(prompt) == [name] and isinstance(prompt[name], types):
            return cast(PlainPrompt, prompt[name])
    form = '{"prompt": <string>} or {"prompt_token_ids": <list of integers>}'
    keys = ", ".join(map(repr, prompt)) or "none"
    raise RequestError(
        f"a prompt that is a dict must be {form}; the keys of this one are {keys}", "prompt"
    )


def one_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    """Return the parameters of each of `count` prompts. Raises RequestError; `param` is "sampling_params"."""
    if params is None:
        params = SamplingParams()
    return _for_each(params, count, (SamplingParams,), "sampling_params")


Loras = LoRARequest | Sequence[LoRARequest | None] | None
"""The adapters of a call: one for all prompts, one for each, or none."""


def lora_for_each(requests: Loras, count: int) -> Sequence[LoRARequest | None]:
    """Return the adapter of each of `count` prompts. Raises RequestError; `param` is "lora_request"."""
    return _for_each(requests, count, (LoRARequest, NoneType), "lora_request")


def _for_each[T](
    argument: object, count: int, types: tuple[type[T], ...], param: str
) -> Sequence[T]:
    """The values of `count` prompts, given as one for all or as a list.

    Args:
        argument: the argument of the caller.
        count: the number of prompts.
        types: the types of a value. Messages name the first one.
        param: the name of the argument.

    Raises:
        RequestError: the argument has another type, or the list another length.
    """
    if isinstance(argument, types):
        return [argument] * count
    if not isinstance(argument, Sequence) or not all(isinstance(one, types) for one in argument):
        message = f"{param} must be a {types[0].__name__} or a list of them, not {type(argument).__name__}"
        raise RequestError(message, param=param)
    if len(argument) != count:
        plural = param if param.endswith("s") else f"{param}s"
        message = f"{len(argument)} {plural} for {count} prompts; give one for each prompt, or one for all"
        raise RequestError(message, param=param)
    return argument


def check_same_adapter(request: LoRARequest, path: str) -> None:
    """Check that a name stands for the adapter of this path. Raises RequestError."""
    if request.lora_path not in ("", path):
        message = f"lora_name {request.lora_name!r} stands for {path}, not for {request.lora_path}; use another name"
        raise RequestError(message, param="lora_request")


def engine_settings(of: str, model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """Return the settings of an engine from the arguments of the class `of`; `decoder` may be a class.

    Raises:
        ConfigError: a setting is unknown or wrong; `param` names it.
    """
    known = [field.name for field in fields(EngineConfig)]
    chosen = {name: settings[name] for name in known if name in settings}
    ignored: list[str] = []
    for name in sorted(chosen):
        if (remark := named_value(name.replace("_", "-"), chosen[name])) is not None:
            del chosen[name]
            ignored.append(f"{name} ({remark})")
    for name in sorted(settings.keys() - known):
        same, value = own_setting(name, settings[name])
        if (same := same.replace("-", "_")) in known and same not in settings:
            chosen[same] = value
            continue
        try:
            if not has_no_effect(name.replace("_", "-"), settings[name]):
                raise ConfigError(unknown_name(of, name, known), param=name)
        except ValueError as error:
            raise ConfigError(str(error), param=name) from None
        ignored.append(name)
    if ignored:
        logger.warning("no effect here, as docs/vllm.md explains: %s", ", ".join(ignored))
    own = chosen.get("decoder")
    named = {"decoder": f"{own.__module__}:{own.__qualname__}"} if isinstance(own, type) else {}
    config = EngineConfig(model=model, **{**chosen, **named})
    _check_filled(of, config)
    return config


def _check_filled(of: str, config: EngineConfig) -> None:
    """Refuse a scheduler or an order that reads a field without an argument. Raises ConfigError."""
    batches = choices_of(config).batches
    missing = ", ".join(sorted(batches.needs - _FILLED))
    if missing:
        setting = "scheduling_policy" if batches.kind.traits.has_orderings else "scheduler"
        message = (
            f"{setting} reads {missing}, which nothing fills: of what schedulers read, the calls of {of} have a "
            "priority alone; serve the model, or leave it out"
        )
        raise ConfigError(message, param=setting)


def ids_only(params: SamplingParams) -> SamplingParams:
    """Return the parameters of a request without texts. Raises RequestError."""
    for name in ("structured", "bad_words"):
        if getattr(params, name):
            raise RequestError(
                f"{name} needs an LLM with a tokenizer, without skip_tokenizer_init", param=name
            )
    return replace(params, detokenize=False)


def encoded(
    prompt: PlainPrompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    add_special_tokens: bool,
    context: int,
) -> tuple[list[int], SamplingParams]:
    """Return the ids of a prompt, and the parameters for the engine. Raises RequestError.

    `context` is the largest number of tokens of a request.
    """
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, add_special_tokens)
    elif isinstance(prompt, SpannedPrompt):
        ids = cast(list[int], prompt)  # the engine reads its spans, or refuses them
    else:
        ids = list(prompt)
    if params.max_tokens == REST_OF_CONTEXT:
        params = replace(params, max_tokens=max(context - len(ids), params.min_tokens, 1))
    return ids, engine_params(params, tokenizer)


@contextlib.contextmanager
def naming(index: int) -> Iterator[None]:
    """Add the index of the prompt to an error."""
    try:
        yield
    except RequestError as error:
        raise RequestError(
            f"prompts[{index}]: {error.message}", param=f"prompts[{index}]"
        ) from error


def encode_prompt(
    prompt: PlainPrompt,
    params: SamplingParams,
    tokenizer: Tokenizer,
    max_model_len: int,
    threads: WorkThreads,
    has_special_tokens: bool,
) -> tuple[list[int], SamplingParams]:
    """The ids of a prompt, and the parameters for the engine. Raises RequestError."""
    convert = partial(encoded, prompt, params, tokenizer, not has_special_tokens, max_model_len)
    if isinstance(prompt, str):
        check_characters(prompt, max_model_len, tokenizer)
    if isinstance(prompt, str) or params.bad_words:
        return threads.run_call(convert)
    return convert()


def check_pooling(params: Sequence[SamplingParams], *, pools: bool) -> None:
    """Refuse `pooling` for texts. Raises RequestError."""
    if not pools and any(each.pooling is not None for each in params):
        raise RequestError(
            "pooling is an argument of LLM.embed; generate makes texts", param="pooling"
        )


@contextlib.contextmanager
def config_errors() -> Iterator[None]:
    """Raise a RequestError of this block as a ConfigError: no request is wrong."""
    try:
        yield
    except RequestError as error:
        raise ConfigError(error.message, error.param) from None
