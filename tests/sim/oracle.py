"""The toy model's output for one request alone, with neither pages nor batches: the oracle of tests."""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

from orca_jax.sim.toy_logits import has_adjustments, toy_adjusted, toy_logprobs, toy_noise
from orca_jax.values.request import Constraint, SamplingParams, TokenLogprobs
from orca_jax.values.step import SpannedPrompt


def toy_generate(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    vocab_size: int,
    seed: int = 0,
    eos_token_ids: Collection[int] = (),
    constraint: Constraint | None = None,
    adapter: int = 0,
) -> list[int]:
    """The toy model's output for one request alone, with neither pages nor batches: the oracle of tests.

    `seed` is the resolved one, for a request without its own seed. `constraint` must be fresh; it applies
    together with the parameters. `adapter` is the number of an adapter. A final stop token is included. The ids end
    when no id is allowed.
    """
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    ids = list(prompt_ids)
    total = sum((i + 1) * (value + 1 + adapter) for i, value in enumerate(values_of(prompt_ids)))
    is_plain = constraint is None and not _is_limited(params) and not has_adjustments(params)
    for _ in range(params.max_tokens):
        noise = toy_noise(
            params.temperature, params.top_k, seed if params.seed is None else params.seed, len(ids)
        )
        token = (total + noise) % vocab_size
        if not is_plain:
            generated = ids[len(prompt_ids) :]
            tokens = -1 if constraint is None else constraint.allowed()  # -1 has all bits
            allowed = [
                i
                for i in range(vocab_size)
                if tokens >> i & 1 and _may_follow(i, generated, params, stop_ids)
            ]
            if not allowed:
                break
            logits = toy_adjusted(token, params, prompt_ids, Counter(generated), vocab_size)
            token = max(allowed, key=logits.__getitem__)
        ids.append(token)
        total += len(ids) * (token + 1 + adapter)
        if token in stop_ids:
            break
        if constraint is not None:
            constraint.accept(token)
    return ids[len(prompt_ids) :]


def values_of(prompt: Sequence[int]) -> list[int]:
    """The number of each token: its id, or in a vector span `name:first` the numbers from `first` on."""
    values = list(prompt)
    if isinstance(prompt, SpannedPrompt):
        for span in prompt.spans:
            _, first = span.key.split(":")
            values[span.place : span.end] = range(int(first), int(first) + span.length)
    return values


def _is_limited(params: SamplingParams) -> bool:
    return bool(params.min_tokens or params.bad_token_ids) or params.allowed_token_ids is not None


def _may_follow(
    token: int, generated: list[int], params: SamplingParams, stop_ids: Collection[int]
) -> bool:
    """True if a request's own parameters allow an id as the next one."""
    if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
        return False
    if len(generated) < params.min_tokens and token in stop_ids:
        return False
    after = (*generated, token)
    return not any(after[-len(bad) :] == bad for bad in params.bad_token_ids)


def toy_score(ids: Sequence[int], num_top: int, *, vocab_size: int) -> list[TokenLogprobs]:
    """Log probabilities of the ids from the second on, each given the ids before it: the oracle of tests."""
    scores, total = [], 0
    for i, (token, following) in enumerate(pairwise(ids)):
        total += (i + 1) * (token + 1)
        scores.append(toy_logprobs(total % vocab_size, following, num_top, vocab_size))
    return scores
