"""Text for the demo model: files -> a vocabulary -> rows of packed tokens.

A `.jsonl` file holds word problems, one object with `question` and `answer` per line; any other file is plain text.
A row holds either a window of one text, or several whole problems in separate attention segments.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
HELD_OUT = 0.02  # share of each text, at its end

_PLAIN_QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'"})  # prompts are typed with these
_CALCULATOR = re.compile(r"<<[^>]*>>")  # annotations for a calculator; the demo has none


@dataclass(frozen=True)
class Corpus:
    """Texts, and pairs of question and answer."""

    texts: tuple[str, ...]
    problems: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Rows:
    """A batch; all arrays are [rows, length]."""

    ids: np.ndarray
    targets: np.ndarray  # the next id
    positions: np.ndarray
    segments: np.ndarray  # tokens attend within their segment; 0 is padding
    weights: np.ndarray  # of each target in the loss
    answers: np.ndarray  # 1 where the target belongs to an answer


def read_corpus(paths: Sequence[Path]) -> Corpus:
    """Read `.jsonl` files as problems and others as plain text."""
    texts, problems = [], []
    for path in paths:
        content = path.read_text(encoding="utf-8").translate(_PLAIN_QUOTES)
        if path.suffix == ".jsonl":
            records = [json.loads(line) for line in content.splitlines() if line.strip()]
            problems += [(r["question"].strip(), _CALCULATOR.sub("", r["answer"]).strip()) for r in records]
        else:
            texts.append(content)
    return Corpus(tuple(texts), tuple(problems))


def split_texts(corpus: Corpus) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The texts without their tails, and the tails."""
    cuts = [int(len(text) * (1 - HELD_OUT)) for text in corpus.texts]
    heads = tuple(text[:cut] for text, cut in zip(corpus.texts, cuts, strict=True))
    return heads, tuple(text[cut:] for text, cut in zip(corpus.texts, cuts, strict=True))


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Train byte-level BPE. Digits stay single: a number has the same tokens in every place."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pairs = [text for problem in corpus.problems for text in problem]
    paragraphs = [part for text in corpus.texts for part in text.splitlines(keepends=True)]
    tokenizer.train_from_iterator(pairs + paragraphs, trainer)
    return tokenizer


def mark_id(tokenizer: Tokenizer, mark: str) -> int:
    """The id of a special token of `train_tokenizer`."""
    token = tokenizer.token_to_id(mark)
    assert token is not None, mark
    return token


class Packer:
    """Draws rows of tokens, with its own random state.

    Args:
        tokenizer: made by `train_tokenizer`.
        texts: plain texts; the probability of each is proportional to its length.
        problems: question and answer pairs; drawn without replacement, shuffled again each round.
        max_positions: the model's limit; windows of text start anywhere below it, which trains all positions.
        seed: seed of the random state.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        problems: Sequence[tuple[str, str]],
        max_positions: int,
        seed: int,
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._max_positions = max_positions
        self._texts = [np.asarray(tokenizer.encode(text).ids, np.int32) for text in texts]
        newline = tokenizer.encode("\n").ids[0]
        self._starts = [np.flatnonzero(ids[:-1] == newline) + 1 for ids in self._texts]
        marks = [mark_id(tokenizer, mark) for mark in (USER, ASSISTANT, END)]
        self._problems = [self._render(tokenizer, marks, *problem) for problem in problems]
        self._shortest = min((len(ids) - 1 for ids, _ in self._problems), default=0)
        self._queue: list[int] = []

    @staticmethod
    def _render(tokenizer: Tokenizer, marks: list[int], question: str, answer: str) -> tuple[np.ndarray, int]:
        """The ids of one problem, and the number of them before the answer."""
        before = [marks[0], *tokenizer.encode(question).ids, marks[1]]
        return np.asarray([*before, *tokenizer.encode(answer).ids, marks[2]], np.int32), len(before)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Tokens of all texts, and of all problems."""
        return sum(map(len, self._texts)), sum(len(ids) for ids, _ in self._problems)

    def draw(self, rows: int, length: int, problem_rows: int) -> Rows:
        """Draw `rows` rows of `length` tokens: `problem_rows` of them hold problems, the others text."""
        batch = Rows(*(np.zeros((rows, length), kind) for kind in ("i4", "i4", "i4", "i4", "f4", "f4")))
        for row in range(rows):
            if row < problem_rows:
                self._fill_with_problems(batch, row, length)
            else:
                self._fill_with_text(batch, row, length)
        return batch

    def _fill_with_text(self, batch: Rows, row: int, length: int) -> None:
        sizes = np.asarray([len(ids) for ids in self._texts])
        which = self._random.choice(len(sizes), p=sizes / sizes.sum())
        ids, starts = self._texts[which], self._starts[which]
        room = np.searchsorted(starts, len(ids) - length)  # line starts with a full window after them
        start = int(self._random.choice(starts[:room])) if room else 0
        offset = int(self._random.integers(0, self._max_positions - length + 1)) if self._random.random() < 0.5 else 0
        self._place(batch, row, 0, ids[start : start + length + 1], offset, 1)

    def _fill_with_problems(self, batch: Rows, row: int, length: int) -> None:
        """Fill a row with the next problems that fit; longer ones stay at the head of the queue for a longer row."""
        filled, segment = 0, 1
        while self._problems and (index := self._next_that_fits(length - filled)) is not None:
            ids, before = self._problems[index]
            self._place(batch, row, filled, ids, 0, segment)
            end = filled + len(ids) - 1
            batch.answers[row, filled + before - 1 : end] = 1.0
            filled, segment = end, segment + 1

    def _next_that_fits(self, room: int) -> int | None:
        if room < self._shortest:
            return None
        if len(self._queue) < 64:
            self._queue += self._random.permutation(len(self._problems)).tolist()
        for place, index in enumerate(self._queue):
            if len(self._problems[index][0]) - 1 <= room:
                return self._queue.pop(place)
        return None

    @staticmethod
    def _place(batch: Rows, row: int, start: int, ids: np.ndarray, offset: int, segment: int) -> None:
        """Write all but the last of `ids` as inputs and all but the first as targets."""
        span = slice(start, start + len(ids) - 1)
        batch.ids[row, span] = ids[:-1]
        batch.targets[row, span] = ids[1:]
        batch.positions[row, span] = np.arange(offset, offset + len(ids) - 1)
        batch.segments[row, span] = segment
        batch.weights[row, span] = 1.0
