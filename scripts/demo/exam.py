"""Loss and accuracy on held-out texts and tasks during training.

An answer counts if each of its tokens is the most likely one after the tokens before it: greedy decoding then gives it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from demo.data import Packer, Rows, place, render
from demo.tasks import mixture
from demo.tasks.example import Conversation
from demo.training import Trainer

LENGTH, ROWS = 512, 4
COUNT, SEED = 48, 1  # conversations of each group


@dataclass(frozen=True)
class Scores:
    """Losses in nats per token, and the share of right answers of each group of tasks."""

    answer_loss: float
    text_loss: float
    accuracy: dict[str, float]


class Exam:
    """Held-out rows, made once."""

    def __init__(self, tokenizer: Tokenizer, tails: Sequence[str]) -> None:
        self._texts = []
        if tails:
            self._texts = [
                Packer(tokenizer, tails, iter(()), LENGTH, 0).draw(ROWS, LENGTH, ROWS)
                for _ in range(2)
            ]
        self._tasks = {
            name: _pack(tokenizer, chosen)
            for name, chosen in mixture.examination(COUNT, SEED).items()
        }

    def score(self, trainer: Trainer) -> Scores:
        """The scores of the current parameters."""
        sums = np.zeros((2, 2))
        accuracy = {}
        for rows in self._texts:
            losses, _ = trainer.scores(rows)
            sums[1] += (losses * rows.weights).sum(), rows.weights.sum()
        for name, batches in self._tasks.items():
            right: list[bool] = []
            for rows in batches:
                losses, hits = trainer.scores(rows)
                sums[0] += (losses * rows.weights).sum(), rows.weights.sum()
                right += _right(rows, hits)
            accuracy[name] = round(float(np.mean(right)), 4)
        answers, texts = (float(total / max(count, 1.0)) for total, count in sums)
        return Scores(answers, texts, accuracy)


def _pack(tokenizer: Tokenizer, conversations: Sequence[Conversation]) -> list[Rows]:
    """The conversations in rows of `LENGTH` tokens, in batches of `ROWS` rows."""
    rendered = [render(tokenizer, conversation) for conversation in conversations]
    batches: list[Rows] = []
    row = ROWS
    filled = 0
    segment = 0
    for piece in (piece for piece in rendered if len(piece.ids) <= LENGTH):
        if not batches or filled + len(piece.ids) - 1 > LENGTH:
            row += 1
            filled = 0
            segment = 0
        if row >= ROWS:
            batches.append(
                Rows(*(np.zeros((ROWS, LENGTH), kind) for kind in ("i4", "i4", "i4", "i4", "f4")))
            )
            row = 0
            filled = 0
            segment = 0
        segment += 1
        place(batches[-1], row, filled, piece, segment)
        filled += len(piece.ids) - 1
    return batches


def _right(rows: Rows, hits: np.ndarray) -> list[bool]:
    """For each segment, whether all learnt tokens are hit."""
    found = []
    for row in range(len(rows.ids)):
        for segment in range(1, rows.segments[row].max() + 1):
            learnt = (rows.segments[row] == segment) & (rows.weights[row] > 0)
            found.append(bool(hits[row][learnt].all()))
    return found
