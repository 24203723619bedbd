"""A question with its right answer, and the check of another answer to it."""

import json
import re
from dataclasses import dataclass
from typing import Any
from zlib import crc32

HELD_OUT_EVERY = 20  # one of so many questions is for the test alone

_STEP = re.compile(r"(\d+) ([-+x/]) (\d+) = (\d+)")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Example:
    """A question and its answer.

    Attributes:
        question: the text of the user.
        answer: the text to learn.
        result: the last number of each right answer; None compares the text.
        accepted: further right answers.
    """

    question: str
    answer: str
    result: int | None = None
    accepted: tuple[str, ...] = ()

    def is_right(self, given: str) -> bool:
        """True if `given` is right: each step is true and the last number is the result, or the text is the same."""
        if self.result is not None:
            numbers = _NUMBER.findall(given)
            return bool(numbers) and int(numbers[-1]) == self.result and has_true_steps(given)
        if self.answer.startswith("{"):
            return _json(given) == json.loads(self.answer)
        return given.strip() in (self.answer, *self.accepted)


Conversation = tuple[Example, ...]


def has_true_steps(text: str) -> bool:
    """True if each "a + b = c" in the text is true."""
    return all(_value(int(a), sign, int(b)) == int(c) for a, sign, b, c in _STEP.findall(text))


def _value(a: int, sign: str, b: int) -> float:
    return {"+": a + b, "-": a - b, "x": a * b, "/": a / b if b else float("nan")}[sign]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def is_held_out(conversation: Conversation) -> bool:
    """True if the conversation, or one of its problems, is for the test alone: a twentieth of all, by a hash."""
    problems = [example.question for example in conversation if example.result is not None]
    texts = ["\n".join(example.question for example in conversation), *problems]
    return any(crc32(text.encode()) % HELD_OUT_EVERY == 0 for text in texts)


def as_json(value: dict[str, Any]) -> str:
    """JSON without blanks, the form of the server's structured output."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
