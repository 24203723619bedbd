"""Constraints on the next id of a request, made of its parameters; a grammar is passed in as a further one."""

from collections.abc import Collection, Iterable, Sequence

from orca_jax.request import Constraint, SamplingParams, TokenSet, token_set


def all_tokens(vocab_size: int) -> TokenSet:
    """The set of all ids of a vocabulary."""
    return (1 << vocab_size) - 1


def build_constraint(
    params: SamplingParams, end_ids: Collection[int], vocab_size: int, outer: Constraint | None = None
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
        return parts[0] if parts else None
    return AllOf(parts)


def after(constraint: Constraint, token_id: int) -> Constraint | None:
    """Advance a constraint by a generated id; returns the constraint, or None if it forbids nothing from now on."""
    constraint.accept(token_id)
    return None if isinstance(constraint, MinTokens | AllOf) and constraint.is_over else constraint


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
