"""Questions about the engine and the demo, in many wordings."""

import re
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from demo.tasks.example import Conversation, Example
from demo.tasks.words import sections, wording

# "name of the fact: question" on each line
HELD_OUT = Path(__file__).parent / "held_out_questions.txt"

_SYNONYMS = {
    "How do I": (
        "How can I",
        "How does one",
        "How should I",
        "How would I",
        "What do I do to",
        "Tell me how to",
        "Show me how to",
        "how do I",
    ),
    "How can I": ("How do I", "Is there a way to", "How would I", "how can I", "I want to know how I can"),
    "Which": ("What", "which"),
    "What does": ("what does", "Do you know what"),
    "Why": ("why", "For what reason"),
    "engine": ("server", "system", "engine", "orca-jax", "software"),
    "Can I": ("May I", "Is it possible to", "Am I able to", "can I"),
    "request": ("request", "prompt", "query"),
    "requests": ("requests", "prompts", "queries"),
    "When": ("when", "At which moment"),
}  # fmt: skip
_SMALL = frozenset(["the", "a", "an", "of", "in", "is", "are", "do", "does", "to", "i"])


class Fact(NamedTuple):
    """A fact: terms for patterns, the answers, and questions."""

    name: str
    terms: tuple[str, ...]
    answers: tuple[str, ...]
    questions: tuple[str, ...]


@cache
def facts() -> dict[str, Fact]:
    """The facts of facts.txt by name."""
    found = {}
    for name, lines in sections("facts.txt").items():
        terms = (
            next(line for line in lines if line.startswith("term: "))
            .removeprefix("term: ")
            .split(" | ")
        )
        answers = tuple(line.removeprefix("= ") for line in lines if line.startswith("= "))
        questions = tuple(line.removeprefix("- ") for line in lines if line.startswith("- "))
        found[name] = Fact(name, tuple(terms), answers, questions)
    return found


def held_out_questions() -> list[tuple[str, str]]:
    """The facts and questions of the test, written by hand; no training has them."""
    lines = HELD_OUT.read_text(encoding="utf-8").splitlines()
    parts = [line.partition(": ") for line in lines if line.strip()]
    return [(name, question) for name, _, question in parts]


@cache
def _test_questions() -> frozenset[str]:
    return frozenset(plain(question) for _, question in held_out_questions())


def plain(question: str) -> str:
    """A question without its case and its signs, for comparison."""
    return " ".join(re.findall(r"[a-z0-9_-]+", question.lower()))


def _varied(random: Random, question: str) -> str:
    """The question with another beginning, end, wording or typing."""
    for phrase, others in _SYNONYMS.items():
        if random.random() < 0.3:
            question = re.sub(rf"\b{phrase}\b", random.choice(others), question, count=1)
    if random.random() < 0.15:
        question = _without_a_word(random, question)
    if random.random() < 0.2:
        question = f"{wording(random, 'beginnings of questions')} {question}"
    if random.random() < 0.1:
        question += f" {wording(random, 'ends of questions')}"
    if random.random() < 0.2:
        question = question.lower()
    if random.random() < 0.15:
        question = question.rstrip("?.")
    if random.random() < 0.08:
        question = _mistyped(random, question)
    return question


def _without_a_word(random: Random, text: str) -> str:
    parts = text.split(" ")
    small = [place for place, part in enumerate(parts) if part.lower() in _SMALL]
    if small:
        del parts[random.choice(small)]
    return " ".join(parts)


def _mistyped(random: Random, text: str) -> str:
    place = random.randrange(len(text) - 1)
    return random.choice(
        (
            text[:place] + text[place + 1 :],
            text[:place] + text[place + 1] + text[place] + text[place + 2 :],
        )
    )


def ask(random: Random) -> Conversation:
    """A question about one fact, in no wording of the test."""
    fact = random.choice(list(facts().values()))
    while True:
        if random.random() < 0.35:
            question = wording(random, "questions about a term").format(x=random.choice(fact.terms))
        else:
            question = random.choice(fact.questions)
        question = _varied(random, question)
        if plain(question) not in _test_questions():
            return (Example(question, random.choice(fact.answers), accepted=fact.answers),)
