"""Typed questions, and the texts in which a model reads them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

from orca_jax.values.errors import RequestError

QuestionKind = Literal["yes_no", "choice", "score"]
Alphabet = Literal["words", "letters", "digits"]
"""The labels of the options: yes and no, A to Z or two letters, 0 to 9."""

MAX_OPTIONS = 255
NUM_DIGITS = 10
_CLOSINGS: Mapping[Alphabet, str] = {
    "words": "Answer with yes or no only.",
    "letters": "Answer with the letter of one option only.",
    "digits": "Answer with the number of one level only.",
}


class AnswerOption(NamedTuple):
    """An answer to choose: its name, and a description for the model."""

    name: str
    description: str | None = None

    @property
    def line(self) -> str:
        """The text after its label."""
        if self.description is None:
            return self.name
        return f"{self.name} - {self.description}"


@dataclass(frozen=True)
class Question:
    """A typed question with the answers that it allows. Make one by `yes_no`, `choice` or `score`.

    Attributes:
        kind: its type; calibration has one entry for each.
        text: the question; empty for none.
        options: the answers in order. For "yes_no" the first one is no, and the second one yes.
        alphabet: the labels that the model answers with.
        before: text before it.
        is_plain: True if the text is all that the model reads.

    Raises:
        RequestError: `param` is "options" or "levels".
    """

    kind: QuestionKind
    text: str
    options: tuple[AnswerOption, ...]
    alphabet: Alphabet
    before: str = ""
    is_plain: bool = False

    def __post_init__(self) -> None:
        param = "levels" if self.kind == "score" else "options"
        number = len(self.options)
        if not 1 <= number <= MAX_OPTIONS:
            message = f"{param} must have 1 to {MAX_OPTIONS} entries, got {number}"
            raise RequestError(message, param=param)

    @classmethod
    def yes_no(cls, text: str, yes: str | None = None, no: str | None = None) -> Self:
        """A question that is answered by yes or no, with descriptions of either side."""
        return cls("yes_no", text, (AnswerOption("no", no), AnswerOption("yes", yes)), "words")

    @classmethod
    def choice(cls, text: str, options: Sequence[str] | Mapping[str, str | None]) -> Self:
        """A question that is answered by one of several options, with or without descriptions."""
        described = options if isinstance(options, Mapping) else dict.fromkeys(options)
        if len(described) < len(options):
            raise RequestError("options must be different from each other", param="options")
        return cls(
            "choice", text, tuple(AnswerOption(*each) for each in described.items()), "letters"
        )

    @classmethod
    def score(cls, text: str, levels: Sequence[str]) -> Self:
        """A question that is answered by one of several levels, the lowest first."""
        alphabet: Alphabet = "digits" if len(levels) <= NUM_DIGITS else "letters"
        return cls("score", text, tuple(AnswerOption(level) for level in levels), alphabet)

    @property
    def rotations(self) -> Sequence[int]:
        """The orders for an average: all rotations of a few lettered options, and two of many."""
        number = len(self.options)
        if self.alphabet != "letters" or number < 2:
            return (0,)
        if number <= NUM_DIGITS:
            return range(number)
        return (0, number // 2)

    @property
    def size(self) -> int:
        """Characters of the question and its options, about."""
        return len(self.before) + len(self.text) + sum(len(option.line) for option in self.options)

    def prompt(self, labels: Sequence[str], rotation: int = 0) -> str:
        """The text of the question. Label i stands for option (i + rotation) modulo their number."""
        if self.is_plain:
            return self.text
        lines = []
        if self.alphabet == "words":
            lines += self._described_sides()
            text = f"Is the following true? {self.text}".rstrip()
        else:
            text = self.text
            number = len(self.options)
            for place, label in enumerate(labels):
                lines.append(f"{label}: {self.options[(place + rotation) % number].line}")
        heading = [f"Question: {text}"] if text else []
        return self.before + "\n".join([*heading, *lines, _CLOSINGS[self.alphabet]])

    def _described_sides(self) -> list[str]:
        no, yes = self.options
        return [f"{side.name}: {side.description}" for side in (yes, no) if side.description]


def as_text(value: Any) -> str:
    """A state, a question or a description as text: a string as it is, and JSON in its compact form."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
