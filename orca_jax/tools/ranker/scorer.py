"""Scores one prompt on the host, in NumPy: longer outputs get higher scores.

A scheduler needs an order, not a length, and an order is easier to learn (Fu et al., "Efficient LLM Scheduling by
Learning to Rank", NeurIPS '24). Letters: T tokens of the prompt, D width after projection, Q queries, V vocabulary.

A prompt is scored when it arrives, while an iteration runs. On the device the score would have to wait for that
iteration, and so would the engine. The arithmetic is a few thousand operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Calibration:
    """Maps scores to tokens: linear between knots, constant outside. Both arrays ascend; float32 [knots]."""

    scores: np.ndarray
    tokens: np.ndarray

    def __call__(self, score: float) -> float:
        """Return the tokens for a score."""
        return float(np.interp(score, self.scores, self.tokens))


@dataclass(frozen=True)
class Scorer:
    """A trained ranker with the projected embedding as one table; float32. `scripts/length_ranker` trains it."""

    table: np.ndarray  # [V, D]
    queries: np.ndarray  # [D, Q]
    hidden_kernel: np.ndarray  # [Q * D + 1, hidden]
    hidden_bias: np.ndarray  # [hidden]
    out_kernel: np.ndarray  # [hidden, 1]
    out_bias: np.ndarray  # [1]
    calibration: Calibration

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary; all prompt ids are below it."""
        return int(self.table.shape[0])

    def __call__(self, prompt_ids: Sequence[int]) -> float:
        """Return the predicted number of output tokens."""
        return self.calibration(self.score(prompt_ids))

    def score(self, prompt_ids: Sequence[int]) -> float:
        """Return the score of one prompt, equal to that of the trained model. The prompt has at least one token."""
        tokens = self.table[np.asarray(prompt_ids)]  # [T, D]
        shares = tokens @ self.queries  # [T, Q]
        shares = np.exp(shares - shares.max(axis=0))
        means = (shares / shares.sum(axis=0)).T @ tokens  # [Q, D]
        seen = np.append(means.ravel(), np.float32(np.log1p(len(prompt_ids))))
        hidden = _gelu(seen @ self.hidden_kernel + self.hidden_bias)
        return float((hidden @ self.out_kernel + self.out_bias)[0])


def _gelu(x: np.ndarray) -> np.ndarray:
    """Approximate GELU by tanh, as the trained model does."""
    return 0.5 * x * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x**3)))
