"""Log probabilities under the model's own distribution: before bias, penalties, masks, temperature and filters."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from orca_jax.exec.sampling.draw import first_column
from orca_jax.request import MAX_LOGPROBS, TokenLogprobs


class TopLogprobs(NamedTuple):
    """Log probabilities of each place: the scored token in the first column, then the most probable ones."""

    ids: Int[Array, "B K"]  # the first column holds the token's rank
    logprobs: Float[Array, "B K"]


def score(logits: Float[Array, "B N"], chosen: Int[Array, " B"], axis: str) -> TopLogprobs:
    """Log probability and rank of one token of each row, and the most probable tokens, from N of the columns.

    Args:
        logits: of the model, unchanged but for minus infinity in the columns of padding.
        chosen: the tokens to score.
        axis: the mesh axis of the columns.
    """
    first, num_columns = first_column(logits, axis), logits.shape[1]
    top = lax.pmax(logits.max(axis=-1), axis)
    total = lax.psum(jnp.exp(logits - top[:, None]).sum(axis=-1), axis)
    norm = top + jnp.log(total)
    column = chosen - first
    here = jnp.take_along_axis(logits, jnp.clip(column, 0, num_columns - 1)[:, None], axis=1)[:, 0]
    logit = lax.psum(jnp.where((column >= 0) & (column < num_columns), here, 0.0), axis)
    better = lax.psum((logits > logit[:, None]).sum(axis=-1, dtype=jnp.int32), axis)
    values, columns = lax.top_k(logits, min(MAX_LOGPROBS, num_columns))
    values = lax.all_gather(values, axis, axis=1, tiled=True)
    ids = lax.all_gather(first + columns, axis, axis=1, tiled=True)
    values, indices = lax.top_k(values, MAX_LOGPROBS)  # among equals the lower id, since shards are in order
    ids = jnp.take_along_axis(ids, indices, axis=1)
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
