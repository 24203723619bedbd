"""Log probabilities under the model's own distribution: before bias, penalties, masks, temperature and filters."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from orca_jax.exec.sampling.draw import VocabularyShards
from orca_jax.values.request import MAX_LOGPROBS, TokenLogprobs


class TopLogprobs(NamedTuple):
    """Log probabilities of each place: the scored token in the first column, then the most probable ones."""

    ids: Int[Array, "B K"]  # the first column holds the token's rank
    logprobs: Float[Array, "B K"]


def score(
    logits: Float[Array, "B N"], chosen: Int[Array, " B"], shards: VocabularyShards
) -> TopLogprobs:
    """Log probability and rank of one token of each row, and the most probable tokens, from N of the columns.

    Args:
        logits: the logits of the model, unchanged but for minus infinity in the columns of padding.
        chosen: the tokens to score.
        shards: the parts of the columns.
    """
    _, top = shards.most_probable(logits)
    norm = top + jnp.log(shards.total(jnp.exp(logits - top[:, None])))
    column = chosen - shards.first_column(logits)
    here = jnp.take_along_axis(logits, jnp.clip(column, 0, logits.shape[1] - 1)[:, None], axis=1)[
        :, 0
    ]
    logit = lax.psum(jnp.where((column >= 0) & (column < logits.shape[1]), here, 0.0), shards.axis)
    better = shards.count(logits > logit[:, None])
    values, ids = shards.candidates(logits, MAX_LOGPROBS)
    return TopLogprobs(
        jnp.concatenate([better[:, None] + 1, ids], axis=1),
        jnp.concatenate([logit[:, None], values], axis=1) - norm[:, None],
    )


def no_scores(width: int) -> TopLogprobs:
    """Zeros of the same shapes, for a launch without requests for log probabilities."""
    shape = (width, 1 + MAX_LOGPROBS)
    return TopLogprobs(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


class LogprobReader:
    """Log probabilities on the host, read one place at a time."""

    def __init__(self, top: TopLogprobs, vocab_size: int) -> None:
        self._ids: Sequence[Sequence[int]] = np.asarray(top.ids).tolist()
        self._logprobs: Sequence[Sequence[float]] = np.asarray(top.logprobs).tolist()
        self._vocab_size = vocab_size

    def read(self, place: int, num_top: int) -> TokenLogprobs:
        """One token and the `num_top` most probable ones, or all of a smaller vocabulary."""
        (rank, *ids), (logprob, *logprobs) = self._ids[place], self._logprobs[place]
        count = min(num_top, self._vocab_size)
        return TokenLogprobs(logprob, rank, tuple(ids[:count]), tuple(logprobs[:count]))
