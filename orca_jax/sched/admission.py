"""Checks of a new request: its prompt, its length, and its parameters."""

from collections.abc import Iterable, Sequence

from orca_jax.errors import RequestError
from orca_jax.request import Constraint, SamplingParams
from orca_jax.sched.kv import KVManager


def check_prompt(prompt_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError unless the prompt has ids, and all of them are integers within the vocabulary."""
    if not prompt_ids:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    if set(map(type, prompt_ids)) != {int}:
        wrong = next(token for token in prompt_ids if type(token) is not int)
        raise RequestError(f"prompt ids must be integers, got {wrong!r}", param="prompt")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        wrong = next(token for token in prompt_ids if not 0 <= token < vocab_size)
        raise RequestError(f"prompt id {wrong} is outside the model's vocabulary of {vocab_size} ids", param="prompt")


def check_length(num_prompt: int, max_tokens: int, *, max_model_len: int, kv: KVManager) -> None:
    """Raise RequestError unless the request fits into the model's context and the KV cache.

    `max_tokens` is 0 for a request that generates nothing.
    """
    total = num_prompt + max_tokens
    if not max_tokens and num_prompt > max_model_len:
        message = f"the prompt has {num_prompt} tokens, and the model's context is {max_model_len}; shorten the prompt"
        raise RequestError(message, param="prompt")
    if max_tokens and num_prompt >= max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, and the model's context of {max_model_len} tokens must hold at "
            f"least one generated token too; shorten the prompt to at most {max_model_len - 1} tokens",
            param="prompt",
        )
    if total > max_model_len:
        raise RequestError(
            f"{num_prompt} prompt tokens and max_tokens={max_tokens} make {total} tokens, and the model's context "
            f"is {max_model_len}; lower max_tokens to at most {max_model_len - num_prompt}",
            param="max_tokens",
        )
    if kv.demand(num_prompt, total) > kv.capacity:  # it would block the queue for ever
        longest = kv.longest_request
        holds = (
            f"reserves at most n_slots={kv.n_slots}"
            if kv.has_reservations
            else f"holds {longest} tokens in {kv.capacity} pages"
        )
        raise RequestError(
            f"{num_prompt} prompt tokens and max_tokens={max_tokens} make {total} tokens, and the KV cache {holds}; "
            "request fewer tokens, or start the engine with a larger KV cache",
            param="max_tokens" if max_tokens and num_prompt < longest else "prompt",
        )


def check_params(params: SamplingParams, constraint: Constraint | None, vocab_size: int) -> None:
    """Raise RequestError for ids outside the vocabulary, and for parameters about text.

    `LLM` and the server handle text before they call the engine. `include_stop_str_in_output` and
    `skip_special_tokens` only change their output, and have no effect here.
    """
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("logit_bias", params.logit_bias, vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    for sequence in params.bad_token_ids:
        _check_ids("bad_token_ids", sequence, vocab_size)
    if params.stop:
        _refuse("stop", "use stop_token_ids; LLM and the server search the text for stop strings")
    if params.bad_words:
        _refuse("bad_words", "use bad_token_ids; LLM and the server convert words to ids")
    if params.n > 1:
        message = f"n must be 1 for the engine, got {params.n}; LLM and the server add a request for each candidate"
        raise RequestError(message, param="n")
    if params.structured is not None and constraint is None:
        _refuse("structured", "give its constraint along with the request; LLM and the server compile it")


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if token_id >= vocab_size:
            raise RequestError(
                f"{param}: id {token_id} is outside the model's vocabulary of {vocab_size} ids", param=param
            )


def _refuse(param: str, remedy: str) -> None:
    raise RequestError(f"{param} is about text, and the engine has token ids only; {remedy}", param=param)
