"""Which ids a request may generate next, by its parameters; grammars come from outside, by the same protocol."""

from collections.abc import Collection, Iterable, Sequence

from orca_jax.request import Constraint, SamplingParams, TokenSet


def token_set(ids: Iterable[int]) -> TokenSet:
    """The set of these ids."""
    ids = list(ids)
    flags = bytearray(max(ids, default=0) // 8 + 1)  # not one integer after another: each is as long as the vocabulary
    for token_id in ids:
        flags[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(flags, "little")


def all_tokens(vocab_size: int) -> TokenSet:
    """The set of all ids of a vocabulary."""
    return (1 << vocab_size) - 1


def build_constraint(
    params: SamplingParams, end_ids: Collection[int], vocab_size: int, outer: Constraint | None = None
) -> Constraint | None:
    """What a request may generate, all its parameters and `outer` together; None if they allow everything.

    Args:
        params: `min_tokens`, `allowed_token_ids` and `bad_token_ids` count.
        end_ids: the ids that end the request.
        vocab_size: ids are below it.
        outer: a constraint that stands beside the parameters, such as a grammar.
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
        return parts[0] if parts else None
    return AllOf(parts)


def after(constraint: Constraint, token_id: int) -> Constraint | None:
    """What is left of a constraint when `token_id` was generated: itself, or None when it forbids nothing any more."""
    constraint.accept(token_id)
    return None if isinstance(constraint, MinTokens | AllOf) and constraint.is_over else constraint


class AllowedTokens:
    """Always the same set."""

    def __init__(self, tokens: TokenSet) -> None:
        self._tokens = tokens

    def allowed(self) -> TokenSet:
        """The set."""
        return self._tokens

    def accept(self, token_id: int) -> None:
        """Nothing follows from it."""


class MinTokens:
    """No end of the request before `count` ids were generated."""

    def __init__(self, count: int, tokens: TokenSet) -> None:
        self._left = count
        self._tokens = tokens  # all that do not end the request

    @property
    def is_over(self) -> bool:
        """Whether enough were generated."""
        return self._left <= 0

    def allowed(self) -> TokenSet:
        """All ids but the end tokens."""
        return self._tokens

    def accept(self, token_id: int) -> None:
        """One more."""
        self._left -= 1


class BadSequences:
    """Sequences that are never generated: the last id of one is forbidden where the others of it stand already."""

    def __init__(self, sequences: Iterable[Sequence[int]], everything: TokenSet) -> None:
        single = token_set(ids[0] for ids in sequences if len(ids) == 1)
        self._base = everything & ~single
        self._longer = [(list(ids[:-1]), 1 << ids[-1]) for ids in sequences if len(ids) > 1]
        self._longest = max((len(begin) for begin, _ in self._longer), default=0)
        self._recent: list[int] = []  # as many of the generated ids as a beginning may have

    def allowed(self) -> TokenSet:
        """All ids that do not complete a sequence."""
        tokens = self._base
        for begin, last in self._longer:
            if self._recent[-len(begin) :] == begin:
                tokens &= ~last
        return tokens

    def accept(self, token_id: int) -> None:
        """It may continue a sequence."""
        if self._longest:
            self._recent = [*self._recent, token_id][-self._longest :]


class AllOf:
    """What several constraints allow at once."""

    def __init__(self, parts: Sequence[Constraint]) -> None:
        self._parts = list(parts)

    @property
    def is_over(self) -> bool:
        """Whether no part is left."""
        return not self._parts

    def allowed(self) -> TokenSet:
        """The intersection, which may be empty."""
        first, *rest = self._parts
        tokens = first.allowed()
        for part in rest:
            tokens &= part.allowed()
        return tokens

    def accept(self, token_id: int) -> None:
        """Tell each part, and forget those that are over."""
        self._parts = [part for part in self._parts if after(part, token_id) is not None]
