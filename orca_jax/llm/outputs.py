"""The outputs of `LLM` and `AsyncLLM`, with the fields of vLLM's classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from orca_jax.text.tokenizer import Tokenizer
from orca_jax.values.request import FinishReason, RequestMetrics, TokenLogprobs


class Logprob(NamedTuple):
    """One token under the model's own distribution: before temperature, filters, penalties, biases and masks."""

    logprob: float
    # more probable tokens, plus one; None for those of `logprob_token_ids`
    rank: int | None
    decoded_token: str | None  # None with `detokenize=False`


Logprobs = Mapping[int, Logprob]
"""The token of one position, and then the most probable ones, by their ids."""


@dataclass(frozen=True)
class CompletionOutput:
    """One generated text, with the fields of vLLM's class."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None  # the stop string or id of `stop_token_ids` at its end
    logprobs: tuple[Logprobs, ...] | None = None  # of `token_ids`, if requested
    cumulative_logprob: float | None = None  # sum of the log probabilities of `token_ids`
    # the first token of each later version of the weights, and the version, if a pause kept the request meanwhile
    weight_changes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """A request with its texts, with the fields of vLLM's class."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    metrics: RequestMetrics | None = None  # None if an error or a stop string ended it
    # of `prompt_token_ids`; None for the first one
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    num_cached_tokens: int = 0  # tokens of the prompt read from the prefix cache
    weight_version: int = 0  # of the weights that made its first tokens; see `LLM.update_params`


def by_id(token_id: int, one: TokenLogprobs, tokenizer: Tokenizer | None) -> Logprobs:
    """Return the log probabilities of one position by token id. Without a tokenizer they have no texts."""

    def entry(token: int, logprob: float, rank: int | None) -> Logprob:
        text = (
            None if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
        )
        return Logprob(logprob, rank, text)

    found = {token_id: entry(token_id, one.logprob, one.rank)}
    for rank, (top, logprob) in enumerate(zip(one.top_ids, one.top_logprobs, strict=True), 1):
        if top != token_id:
            found[top] = entry(top, logprob, rank if one.others is None else None)
    return found
