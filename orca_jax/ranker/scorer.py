"""Scores one prompt on the host, in NumPy.

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
    """A trained `Ranker` with the projected embedding as one table; float32. Letters as in `ranker.py`."""

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
        """Return the score of one prompt, equal to that of `Ranker`. The prompt has at least one token."""
        tokens = self.table[np.asarray(prompt_ids)]  # [T, D]
        shares = tokens @ self.queries  # [T, Q]
        shares = np.exp(shares - shares.max(axis=0))
        means = (shares / shares.sum(axis=0)).T @ tokens  # [Q, D]
        seen = np.append(means.ravel(), np.float32(np.log1p(len(prompt_ids))))
        hidden = _gelu(seen @ self.hidden_kernel + self.hidden_bias)
        return float((hidden @ self.out_kernel + self.out_bias)[0])


def calibrate(scores: np.ndarray, lengths: np.ndarray, knots: int = 24) -> Calibration:
    """Fit lengths to scores by isotonic regression over groups of prompts with neighbouring scores.

    Args:
        scores: scores of prompts outside of the training data. float [N], N at least 1.
        lengths: output tokens of these prompts. float [N]
        knots: most groups; they are equally large.
    """
    order = np.argsort(scores, kind="stable")
    groups = np.array_split(order, min(knots, len(order)))
    weights = [float(len(group)) for group in groups]
    means = _ascending([float(np.mean(lengths[group])) for group in groups], weights)
    middles = [float(np.mean(scores[group])) for group in groups]
    return Calibration(np.asarray(middles, np.float32), np.asarray(means, np.float32))


def _ascending(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the closest ascending values in weighted least squares, by pooling adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, count
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] >= mean:
            before, its_weight, its_count = pools.pop()
            mean = (before * its_weight + mean * total) / (its_weight + total)
            total, count = total + its_weight, count + its_count
        pools.append((mean, total, count))
    return [mean for mean, _, count in pools for _ in range(count)]


def _gelu(x: np.ndarray) -> np.ndarray:
    """Approximate GELU by tanh, as `Ranker` does."""
    return 0.5 * x * (1 + np.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x**3)))
