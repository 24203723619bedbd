"""Calls for decisions about sentences: questions of all kinds, with labels of one token and of several."""

import random
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from orca_jax import LLM, Question
from orca_jax.text.decisions.labels import AnswerLabels, LabelFinder
from orca_jax.text.decisions.questions import Alphabet
from orca_jax.text.decisions.reads import Readout, reading
from orca_jax.values.request import TokenLogprobs

_THINGS = ("the boat", "the letter", "a grey horse", "the old bridge", "my neighbour", "the market")
_DEEDS = ("came back late", "was broken by the storm", "lay still", "gave much joy", "was lost")
_PLACES = ("in the harbour", "before breakfast", "on a cold morning", "after the war", "at school")
_WORDS = (
    "delighted",
    "deeply disappointed",
    "indifferent",
    "deeply embarrassed",
    "frightened of it",
    "grateful to all",
)


class PlainRead(NamedTuple):
    """A question as ids: the prompt, and the tokens of each label."""

    prompt: list[int]
    labels: list[list[int]]


class WordLabels(LabelFinder):
    """Labels that are words, most of them of several tokens."""

    def _find(self, alphabet: Alphabet, number: int) -> AnswerLabels:
        """The labels of so many options; the alphabet is not read."""
        return self._labels(_WORDS[:number])


def state(draw: random.Random, sentences: int = 3) -> str:
    """A few sentences."""
    parts = [
        f"{draw.choice(_THINGS)} {draw.choice(_DEEDS)} {draw.choice(_PLACES)}."
        for _ in range(sentences)
    ]
    return " ".join(part.capitalize() for part in parts)


def question(draw: random.Random, kind: int) -> Question:
    """A question; its kind is a number."""
    thing = draw.choice(_THINGS)
    if kind % 4 == 0:
        return Question.yes_no(f"{thing} {draw.choice(_DEEDS)}", yes="the text says so")
    if kind % 4 == 1:
        options = draw.sample(_PLACES, 4)
        return Question.choice(f"Where or when was {thing} seen?", options)
    if kind % 4 == 2:
        return Question.score(f"How bad was it for {thing}?", ["good", "fair", "bad", "ruinous"])
    words = [*_WORDS[: draw.randrange(3, 7)]]
    return Question.choice(f"How does the owner of {thing} feel? Answer with one word.", words)


def readout(llm: LLM, text: str, questions: Sequence[Question], *, words: bool) -> Readout:
    """The reads of a call; with `words` the labels are words."""
    plain = llm._decision_texts.reading(text, questions, "given", 1.0, None, None)
    if not words:
        return plain
    first = plain.reads[0].prompt_ids
    tokenizer = llm.tokenizer
    mark = questions[0].prompt(plain.labels[0].texts)
    tail = tokenizer.decode(first, skip_special_tokens=False).partition(mark)[2]
    finder = WordLabels(tokenizer, tail)

    def encode(asked: str) -> list[int]:
        return tokenizer.encode(asked + tail, False)

    return reading(questions, first[: plain.shared], encode, finder)


def plain_reads(call: Readout) -> list[PlainRead]:
    """The questions of a call as ids."""
    starts = [sum(call.num_reads[:place]) for place in range(len(call.questions))]
    prompts = [call.reads[start].prompt_ids for start in starts]
    found = zip(prompts, call.labels, strict=True)
    return [PlainRead(prompt, list(map(list, labels.ids))) for prompt, labels in found]


def scores_of(llm: LLM, calls: Sequence[Readout]) -> list[list[TokenLogprobs]]:
    """The scores of the reads of each call. All calls run together."""
    names = []
    for number, call in enumerate(calls):
        for place, read in enumerate(call.reads):
            names.append(f"read {number} {place}")
            llm.engine.add_request(names[-1], read.prompt_ids, read.params(call.shared, ""))
    found: dict[str, TokenLogprobs] = {}
    while llm.engine.has_work:
        for update in llm.engine.step():
            if update.logprobs:
                found[update.request_id] = update.logprobs[0]
    left = iter([found[name] for name in names])
    return [list(islice(left, len(call.reads))) for call in calls]
