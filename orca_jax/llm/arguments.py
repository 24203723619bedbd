"""Checks of the arguments of `LLM`."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

from orca_jax.errors import RequestError
from orca_jax.request import SamplingParams

PromptInput = str | Sequence[int]


def as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """Return a list of prompts; one alone counts as a list of one. Raises RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts must be a string, a list of token ids, or a list of these, not {type(prompts).__name__}"
        )
    if prompts and all(isinstance(part, int) for part in prompts):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[PromptInput], prompts))


def one_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    """Return the parameters of each of `count` prompts. Raises RequestError; `param` is "sampling_params"."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    given: object = params
    if not isinstance(given, Sequence) or not all(isinstance(one, SamplingParams) for one in given):
        message = f"sampling_params must be a SamplingParams or a list of them, not {type(params).__name__}"
        raise RequestError(message, param="sampling_params")
    if len(params) != count:
        message = f"{len(params)} sampling_params for {count} prompts; give one for each prompt, or one for all"
        raise RequestError(message, param="sampling_params")
    return params


@contextlib.contextmanager
def naming(index: int) -> Iterator[None]:
    """Add the index of the prompt to an error."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"prompts[{index}]: {error.message}", param=f"prompts[{index}]") from error
