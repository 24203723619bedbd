"""Labels of answers: the tokens that stand for them after a prompt."""

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

from orca_jax.text.decisions.questions import MAX_OPTIONS, NUM_DIGITS, Alphabet
from orca_jax.text.tokenizer import Tokenizer

LETTERS = tuple(string.ascii_uppercase)
PAIRS = tuple(first + second for first, second in product(LETTERS, LETTERS))
_WORDS = ("no", "yes")


@dataclass(frozen=True)
class AnswerLabels:
    """Labels with their ids, in the order of the options.

    Attributes:
        texts: the labels.
        ids: the tokens of each label.
    """

    texts: Sequence[str]
    ids: Sequence[tuple[int, ...]]
    # the tokens that may follow each beginning of a label; the first beginning is empty
    following: Mapping[tuple[int, ...], tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[tuple[int, ...], dict[int, None]] = {(): {}}
        for ids in self.ids:
            for end, token in enumerate(ids):
                found.setdefault(ids[:end], {})[token] = None
        following = {begun: tuple(tokens) for begun, tokens in found.items()}
        object.__setattr__(self, "following", following)

    @property
    def are_single(self) -> bool:
        """True if each label is one token of its own."""
        return len(self.following) == 1 and len(self.following[()]) == len(self.texts)


class LabelFinder:
    """Finds labels for a place: the tokens of each label after the text before it. Any thread may use it.

    Args:
        tokenizer: the tokenizer of the model.
        tail: the end of all prompts, such as the begin of an answer in the chat template.
    """

    def __init__(self, tokenizer: Tokenizer, tail: str) -> None:
        self._tokenizer = tokenizer
        self._tail = tail
        self._before = tokenizer.encode(tail, False)
        self.find = lru_cache(maxsize=None)(self._find)  # few alphabets, and numbers below 256

    def most_single(self, alphabet: Alphabet) -> int:
        """The most options with single labels, up to the limit of options."""
        counts = {"words": (2,), "digits": (NUM_DIGITS,)}.get(alphabet, (MAX_OPTIONS, len(LETTERS)))
        for number in counts:
            if self.find(alphabet, number).are_single:
                return number
        return 0

    def _find(self, alphabet: Alphabet, number: int) -> AnswerLabels:
        """The labels of so many options.

        They are single tokens if the vocabulary has enough of them. More options than letters have pairs of letters.
        """
        if alphabet == "words":
            return self._labels(_WORDS)
        if alphabet == "digits" and number <= NUM_DIGITS:
            return self._labels(string.digits[:number])
        if number <= len(LETTERS):
            return self._labels(LETTERS[:number])
        single = list(self._single_pairs(number))
        if len(single) == number:
            return self._labels(single)
        return self._labels(PAIRS[:number])

    def _labels(self, texts: Sequence[str]) -> AnswerLabels:
        return AnswerLabels(tuple(texts), [self._ids(text) for text in texts])

    def _single_pairs(self, number: int) -> Iterator[str]:
        """The first pairs of letters that are single tokens."""
        for pair in PAIRS:
            if number and len(self._ids(pair)) == 1:
                number -= 1
                yield pair

    def _ids(self, text: str) -> tuple[int, ...]:
        """The tokens of a label at this place. A label that would join the text before it counts by itself."""
        whole = self._tokenizer.encode(self._tail + text, False)
        number = len(self._before)
        if len(whole) > number and whole[:number] == self._before:
            return tuple(whole[number:])
        return tuple(self._tokenizer.encode(text, False))
