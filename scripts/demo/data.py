"""Text for the demo model: files and generated conversations -> a vocabulary -> rows of packed tokens.

A row holds either a window of one text, or several whole conversations and stories in separate attention segments.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from demo.tasks.example import Conversation

END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
HELD_OUT = 0.02  # share of each text, at its end
# of a token of literature in the loss; of an answer's token it is 1, of a question's 0
TEXT_WEIGHT = 0.5
QUEUE = 64  # pieces that wait for a row with enough room
# tokens of a piece that waits for a long row; beyond a quarter of the queue, such ones are dropped
LONG = 200

Piece = Conversation | str  # a conversation, or a text that is learnt whole

# prompts are typed with these
_PLAIN_QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'"})


@dataclass(frozen=True)
class Rows:
    """A batch; all arrays are [rows, length]."""

    ids: np.ndarray
    targets: np.ndarray  # the next id
    positions: np.ndarray
    segments: np.ndarray  # tokens attend within their segment; 0 is padding
    weights: np.ndarray  # of each target in the loss


def read_texts(paths: Sequence[Path]) -> tuple[str, ...]:
    """Read text files, with plain quotation marks."""
    return tuple(path.read_text(encoding="utf-8").translate(_PLAIN_QUOTES) for path in paths)


def split_texts(texts: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The texts without their tails, and the tails."""
    cuts = [int(len(text) * (1 - HELD_OUT)) for text in texts]
    heads = tuple(text[:cut] for text, cut in zip(texts, cuts, strict=True))
    return heads, tuple(text[cut:] for text, cut in zip(texts, cuts, strict=True))


def train_tokenizer(
    texts: Sequence[str], pieces: Iterator[Piece], vocab_size: int, count: int = 20_000
) -> Tokenizer:
    """Train byte-level BPE on texts and the first `count` pieces.

    Digits and blanks are tokens of their own: a number and a word have the same tokens in every place, also after a
    quotation mark and at the beginning of a text. So a word is copied token by token.
    """
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    blanks = pre_tokenizers.Split(" ", "isolated")
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, blanks, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    generated = chain.from_iterable(map(_parts, islice(pieces, count)))
    paragraphs = chain.from_iterable(text.splitlines(keepends=True) for text in texts)
    tokenizer.train_from_iterator([*generated, *paragraphs], trainer)
    return tokenizer


def _parts(piece: Piece) -> list[str]:
    if isinstance(piece, str):
        return [piece]
    return list(chain.from_iterable((example.question, example.answer) for example in piece))


def mark_id(tokenizer: Tokenizer, mark: str) -> int:
    """The id of a special token of `train_tokenizer`."""
    token = tokenizer.token_to_id(mark)
    assert token is not None, mark
    return token


@dataclass(frozen=True)
class Rendered:
    """The tokens of a piece; `is_learnt` is of each token, as a target."""

    ids: np.ndarray
    is_learnt: np.ndarray


def render(tokenizer: Tokenizer, piece: Piece) -> Rendered:
    """The tokens of a text, or of a conversation in the form of the chat template; only answers are learnt of it."""
    user, assistant, end = (mark_id(tokenizer, mark) for mark in (USER, ASSISTANT, END))
    ids: list[int] = []
    learnt: list[bool] = []

    def add(tokens: Sequence[int], is_learnt: bool) -> None:
        ids.extend(tokens)
        learnt.extend([is_learnt] * len(tokens))

    if isinstance(piece, str):
        add([*tokenizer.encode(piece).ids, end], True)
    else:
        for example in piece:
            add([user, *tokenizer.encode(example.question).ids, assistant], False)
            add([*tokenizer.encode(example.answer).ids, end], True)
    return Rendered(np.asarray(ids, np.int32), np.asarray(learnt))


class Packer:
    """Draws rows of tokens, with its own random state.

    Args:
        tokenizer: made by `train_tokenizer`.
        texts: plain texts; the probability of each is proportional to its length.
        pieces: conversations and stories, taken in turn; the packer stops early only if they end.
        max_positions: the longest piece; longer ones are dropped.
        seed: seed of the random state.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Sequence[str],
        pieces: Iterator[Piece],
        max_positions: int,
        seed: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._max_positions = max_positions
        self._random = np.random.default_rng(seed)
        self._texts = [np.asarray(tokenizer.encode(text).ids, np.int32) for text in texts]
        newline = tokenizer.encode("\n").ids[0]
        self._starts = [np.flatnonzero(ids[:-1] == newline) + 1 for ids in self._texts]
        self._queue: list[Rendered] = []

    @property
    def has_texts(self) -> bool:
        """True if there are plain texts to draw from."""
        return bool(self._texts)

    def draw(self, rows: int, length: int, text_rows: int) -> Rows:
        """Draw `rows` rows of `length` tokens: the last `text_rows` of them hold text, the others pieces."""
        batch = Rows(*(np.zeros((rows, length), kind) for kind in ("i4", "i4", "i4", "i4", "f4")))
        for row in range(rows):
            if row < rows - text_rows:
                self._fill_with_pieces(batch, row, length)
            else:
                self._fill_with_text(batch, row, length)
        return batch

    def _fill_with_text(self, batch: Rows, row: int, length: int) -> None:
        sizes = np.asarray([len(ids) for ids in self._texts])
        which = self._random.choice(len(sizes), p=sizes / sizes.sum())
        ids = self._texts[which]
        starts = self._starts[which]
        # line starts with a full window after them
        room = np.searchsorted(starts, len(ids) - length)
        start = int(self._random.choice(starts[:room])) if room else 0
        window = ids[start : start + length + 1]
        place(batch, row, 0, Rendered(window, np.ones(len(window), bool)), 1, TEXT_WEIGHT)

    def _fill_with_pieces(self, batch: Rows, row: int, length: int) -> None:
        """Fill a row with the next pieces that fit; longer ones wait at the head of the queue for a longer row."""
        filled, segment = 0, 1
        while (piece := self._next_that_fits(length - filled)) is not None:
            place(batch, row, filled, piece, segment)
            filled = filled + len(piece.ids) - 1
            segment += 1

    def _next_that_fits(self, room: int) -> Rendered | None:
        while len(self._queue) < QUEUE and (piece := next(self._pieces, None)) is not None:
            rendered = render(self._tokenizer, piece)
            if len(rendered.ids) <= self._max_positions and not self._is_one_too_many(rendered):
                self._queue.append(rendered)
        for index, rendered in enumerate(self._queue):
            if len(rendered.ids) - 1 <= room:
                return self._queue.pop(index)
        return None

    def _is_one_too_many(self, piece: Rendered) -> bool:
        """True if a long piece would wait beside many others: rows of usual length need short ones to choose from."""
        if len(piece.ids) <= LONG:
            return False
        return sum(len(rendered.ids) > LONG for rendered in self._queue) >= QUEUE // 4


def place(
    batch: Rows, row: int, start: int, piece: Rendered, segment: int, weight: float = 1.0
) -> None:
    """Write all tokens of a piece but the last as inputs and all but the first as targets."""
    ids = piece.ids
    span = slice(start, start + len(ids) - 1)
    batch.ids[row, span] = ids[:-1]
    batch.targets[row, span] = ids[1:]
    batch.positions[row, span] = np.arange(len(ids) - 1)
    batch.segments[row, span] = segment
    batch.weights[row, span] = weight * piece.is_learnt[1:]
