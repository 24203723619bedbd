"""The toy model's distribution, and the changes of its sampler: pure functions with values computable by hand.

The logit of id t is `-((t - favourite) mod vocab_size) / 8`: the favourite has 0, the next id -1/8, and so on around.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from orca_jax.values.request import SamplingParams, TokenLogprobs, TokenSet

SLOPE = 1 / 8


def toy_logprobs(favourite: int, token_id: int, num_top: int, vocab_size: int) -> TokenLogprobs:
    """One id under the model's own distribution; its rank is its distance from the favourite, plus one."""
    distance = (token_id - favourite) % vocab_size
    norm = _norm(vocab_size)
    best = range(min(num_top, vocab_size))
    top_ids = tuple([(favourite + n) % vocab_size for n in best])
    return TokenLogprobs(
        -distance * SLOPE - norm, distance + 1, top_ids, tuple([-n * SLOPE - norm for n in best])
    )


def toy_listed(favourite: int, token_id: int, ids: Sequence[int], vocab_size: int) -> TokenLogprobs:
    """One id and some given ones, with the probability of all others."""
    one = toy_logprobs(favourite, token_id, 0, vocab_size)
    listed = tuple([toy_logprobs(favourite, each, 0, vocab_size).logprob for each in ids])
    return TokenLogprobs(one.logprob, one.rank, tuple(ids), listed, 1 - sum(map(math.exp, listed)))


@lru_cache
def _norm(vocab_size: int) -> float:
    return math.log(sum(math.exp(-distance * SLOPE) for distance in range(vocab_size)))


def toy_noise(temperature: float, top_k: int, seed: int, length: int) -> int:
    """The number of ids to add to the favourite when sampling, after a context of `length` tokens."""
    if temperature > 0:
        return seed + length + max(top_k, 0)
    return 0


def has_adjustments(params: SamplingParams) -> bool:
    """True if biases or penalties change any logit."""
    return params.has_penalty or bool(params.logit_bias)


def toy_adjusted(
    favourite: int,
    params: SamplingParams,
    prompt: Collection[int],
    counts: Mapping[int, int],
    vocab_size: int,
) -> list[float]:
    """All logits after bias and penalties.

    Args:
        favourite: the id with the highest logit before.
        params: the biases and penalties.
        prompt: the ids of the prompt.
        counts: the number of occurrences of each generated id.
        vocab_size: ids are below it.
    """
    logits = [-((token_id - favourite) % vocab_size) * SLOPE for token_id in range(vocab_size)]
    for token_id, bias in dict(params.logit_bias).items():
        logits[token_id] += bias
    for token_id in {*prompt, *counts}:
        factor = params.repetition_penalty
        logits[token_id] = (
            logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
        )
    for token_id, count in counts.items():
        logits[token_id] -= params.presence_penalty + params.frequency_penalty * count
    return logits


def first_allowed(favourite: int, allowed: TokenSet) -> int:
    """The id of the highest logit in a set without adjustments: the first one from the favourite on, around."""
    ahead = allowed >> favourite
    if ahead:
        return favourite + _lowest(ahead)
    return _lowest(allowed)


def _lowest(tokens: TokenSet) -> int:
    return (tokens & -tokens).bit_length() - 1


def best_of(logits: Sequence[float], allowed: TokenSet) -> int:
    """The id of the highest logit in a set; among equals the lowest id."""
    candidates = [token_id for token_id in range(len(logits)) if allowed >> token_id & 1]
    return max(candidates, key=logits.__getitem__)
