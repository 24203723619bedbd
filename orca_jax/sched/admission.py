"""Checks of a new request, its prompt, length and parameters; and the constraints on the next id that these make.

A grammar is passed in as a further constraint.
"""

from collections.abc import Collection, Iterable, Sequence

from orca_jax.sched.kv import KVManager
from orca_jax.values.errors import RequestError
from orca_jax.values.request import Constraint, SamplingParams, TokenSet, token_set


def check_prompt(prompt_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError unless the prompt has ids, and all of them are integers within the vocabulary."""
    if not prompt_ids:
        raise RequestError("the prompt is empty; give at least one token", param="prompt")
    if set(map(type, prompt_ids)) != {int}:
        wrong = next(token for token in prompt_ids if type(token) is not int)
        raise RequestError(f"prompt ids must be integers, got {wrong!r}", param="prompt")
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
        wrong = next(token for token in prompt_ids if not 0 <= token < vocab_size)
        raise RequestError(
            f"prompt id {wrong} is outside the model's vocabulary of {vocab_size} ids",
            param="prompt",
        )


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
        _refuse(
            "structured",
            "give its constraint along with the request; LLM and the server compile it",
        )


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if token_id >= vocab_size:
            raise RequestError(
                f"{param}: id {token_id} is outside the model's vocabulary of {vocab_size} ids",
                param=param,
            )


def _refuse(param: str, remedy: str) -> None:
    raise RequestError(
        f"{param} is about text, and the engine has token ids only; {remedy}", param=param
    )


def all_tokens(vocab_size: int) -> TokenSet:
    """The set of all ids of a vocabulary."""
    return (1 << vocab_size) - 1


def build_constraint(
    params: SamplingParams,
    end_ids: Collection[int],
    vocab_size: int,
    outer: Constraint | None = None,
) -> Constraint | None:
    """Combine `outer` and the constraints of all parameters; returns None if they allow every id.

    Args:
        params: `min_tokens`, `allowed_token_ids` and `bad_token_ids` are read.
        end_ids: the end tokens of the request.
        vocab_size: all ids are below it.
        outer: a constraint beside the parameters, such as a grammar.
    """
    everything = all_tokens(vocab_size)
    parts: list[Constraint] = [] if outer is None else [outer]
    if params.allowed_token_ids is not None:
        parts.append(AllowedTokens(token_set(params.allowed_token_ids)))
    if params.bad_token_ids:
        parts.append(BadSequences(params.bad_token_ids, everything))
    if params.min_tokens and end_ids:
        parts.append(MinTokens(params.min_tokens, everything & ~token_set(end_ids)))
    if len(parts) <= 1:
        if parts:
            return parts[0]
        return None
    return AllOf(parts)


def after(constraint: Constraint, token_id: int) -> Constraint | None:
    """Advance a constraint by a generated id; returns the constraint, or None if it forbids nothing from now on."""
    constraint.accept(token_id)
    if isinstance(constraint, MinTokens | AllOf) and constraint.is_over:
        return None
    return constraint


class AllowedTokens:
    """A fixed set of allowed ids."""

    def __init__(self, tokens: TokenSet) -> None:
        self._tokens = tokens

    def allowed(self) -> TokenSet:
        return self._tokens

    def accept(self, token_id: int) -> None:
        """Does nothing: the set is fixed."""


class MinTokens:
    """Forbids end tokens until `count` ids are generated."""

    def __init__(self, count: int, tokens: TokenSet) -> None:
        self._left = count
        self._tokens = tokens  # all ids except end tokens

    @property
    def is_over(self) -> bool:
        """True if enough ids are generated."""
        return self._left <= 0

    def allowed(self) -> TokenSet:
        """All ids except the end tokens."""
        return self._tokens

    def accept(self, token_id: int) -> None:
        self._left -= 1


class BadSequences:
    """Forbids sequences of ids: the last id of a sequence is not allowed directly after the others."""

    def __init__(self, sequences: Iterable[Sequence[int]], everything: TokenSet) -> None:
        single = token_set(ids[0] for ids in sequences if len(ids) == 1)
        self._base = everything & ~single
        self._longer = [(list(ids[:-1]), 1 << ids[-1]) for ids in sequences if len(ids) > 1]
        self._longest = max((len(begin) for begin, _ in self._longer), default=0)
        self._recent: list[int] = []  # the last generated ids, as many as the longest beginning has

    def allowed(self) -> TokenSet:
        """All ids except those completing a sequence."""
        tokens = self._base
        for begin, last in self._longer:
            if self._recent[-len(begin) :] == begin:
                tokens &= ~last
        return tokens

    def accept(self, token_id: int) -> None:
        if self._longest:
            self._recent = [*self._recent, token_id][-self._longest :]


class AllOf:
    """The intersection of several constraints."""

    def __init__(self, parts: Sequence[Constraint]) -> None:
        self._parts = list(parts)

    @property
    def is_over(self) -> bool:
        """True if no part is left."""
        return not self._parts

    def allowed(self) -> TokenSet:
        """The intersection of the sets; it may be empty."""
        first, *rest = self._parts
        tokens = first.allowed()
        for part in rest:
            tokens &= part.allowed()
        return tokens

    def accept(self, token_id: int) -> None:
        """Advance each part, and drop those without further effect."""
        self._parts = [part for part in self._parts if after(part, token_id) is not None]
