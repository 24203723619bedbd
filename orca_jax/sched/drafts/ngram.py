"""Proposals by lookup: the ids that followed the last occurrence of a request's newest n-gram, in its own tokens.

Texts repeat themselves: answers quote their prompts, code repeats names, and small models run in circles. No model is
needed to propose what came before, so a proposal costs microseconds. The idea is prompt lookup decoding (A. Saxena,
2023), and the settings are those of vLLM.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from orca_jax.sched.drafts.proposer import Acceptance, Chance, Wish
from orca_jax.sched.request import Request

_PRIOR_ANY, _PRIOR_EACH = 0.2, 0.3  # before a request has generated anything


class NgramIndex:
    """The n-grams of one request, with the place after their last occurrence.

    While it grows it also tests itself: each generated id is compared with the one that would have been proposed. So
    the chances are known without any proposal.

    Args:
        least: the shortest n-gram.
        most: the longest n-gram; longer ones are looked up first.
        num_prompt: ids of the prompt; they are not tested.
    """

    def __init__(self, least: int, most: int, num_prompt: int) -> None:
        self.ids: list[int] = []
        self.any = Acceptance(_PRIOR_ANY)
        self.each = Acceptance(_PRIOR_EACH)
        self._num_prompt = num_prompt
        self._lengths = range(most, least - 1, -1)
        # the last occurrence of each n-gram with a follower
        self._place_after: dict[tuple[int, ...], int] = {}
        self._newest: list[tuple[int, ...]] = []  # the n-grams at the end, the longest first
        self._place: int | None = None  # of the first proposed id

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids, and test those that were generated."""
        known = self.ids
        place_after = self._place_after
        tests = matches = hits = 0
        for token in ids:
            end = len(known)
            if end >= self._num_prompt:
                tests += 1
                if self._place is not None:
                    matches += 1
                    hits += known[self._place] == token
            for ngram in self._newest:
                place_after[ngram] = end
            known.append(token)
            self._newest = newest = [tuple(known[-n:]) for n in self._lengths if n <= end + 1]
            self._place = next(
                (place_after[ngram] for ngram in newest if ngram in place_after), None
            )
        if tests:
            self.any.add_tests(matches, tests)
        if matches:
            self.each.add_tests(hits, matches)

    def proposal(self, count: int) -> list[int]:
        """The ids after the last occurrence of the longest n-gram; none without one.

        If the occurrence is too near to the end, its continuation repeats itself, as in a loop.
        """
        if self._place is None:
            return []
        ids = self.ids[self._place : self._place + count]
        while len(ids) < count:
            ids += ids[: count - len(ids)]
        return ids

    @property
    def has_match(self) -> bool:
        """True if there is anything to propose."""
        return self._place is not None


class NgramProposer:
    """Proposes by lookup in prompt and generated ids.

    Args:
        count: the most ids of a proposal.
        least: the shortest n-gram.
        most: the longest n-gram.
    """

    seconds = 0.0

    def __init__(self, count: int, least: int, most: int) -> None:
        assert 1 <= least <= most, f"n-grams of {least} to {most} ids"
        self._count = count
        self._least = least
        self._most = most
        self._indices: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def chance(self, request: Request) -> Chance:
        """The chances, as tested on the generated ids so far."""
        index = self._index(request)
        return Chance(index.any.rate, index.each.rate)

    def ready(self, request: Request) -> int:
        """All ids of a proposal, or none."""
        if self._index(request).has_match:
            return self._count
        return 0

    def propose(self, wishes: Sequence[Wish]) -> list[Sequence[int]]:
        """The continuations of earlier occurrences."""
        return [self._index(wish.request).proposal(wish.number) for wish in wishes]

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Does nothing: the index tests itself."""

    def _index(self, request: Request) -> NgramIndex:
        """The index of a request, with all its known ids."""
        index = self._indices.get(request)
        if index is None:
            index = self._indices[request] = NgramIndex(
                self._least, self._most, len(request.prompt_ids)
            )
        if len(index.ids) < request.num_tokens:
            index.extend(request.ids_from(len(index.ids), request.num_tokens - len(index.ids)))
        return index
