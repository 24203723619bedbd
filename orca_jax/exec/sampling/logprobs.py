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
    """Log probabilities of each place: the first column is the scored token, the others the most probable ones."""

    ids: Int[Array, "B K"]  # the first column holds the token's rank
    logprobs: Float[Array, "B K"]


def score(logits: Float[Array, "B N"], chosen: Int[Array, " B"], axis: str) -> TopLogprobs:
    """Log probability and rank of one token of each row, and of the most probable ones; from N of the columns.

    Args:
        logits: as the model gave them, minus infinity for tokens that do not exist.
        chosen: the tokens to score.
        axis: the mesh axis of the columns.
    """
    first, width = first_column(logits, axis), logits.shape[1]
    top = lax.pmax(logits.max(axis=-1), axis)
    total = lax.psum(jnp.exp(logits - top[:, None]).sum(axis=-1), axis)
    norm = top + jnp.log(total)
    column = chosen - first
    here = jnp.take_along_axis(logits, jnp.clip(column, 0, width - 1)[:, None], axis=1)[:, 0]
    logit = lax.psum(jnp.where((column >= 0) & (column < width), here, 0.0), axis)
    better = lax.psum((logits > logit[:, None]).sum(axis=-1, dtype=jnp.int32), axis)
    values, columns = lax.top_k(logits, min(MAX_LOGPROBS, width))
    values = lax.all_gather(values, axis, axis=1, tiled=True)
    ids = lax.all_gather(first + columns, axis, axis=1, tiled=True)
    values, places = lax.top_k(values, MAX_LOGPROBS)  # among equals the lower id, since shards are in order
    ids = jnp.take_along_axis(ids, places, axis=1)
    return TopLogprobs(
        jnp.concatenate([better[:, None] + 1, ids], axis=1),
        jnp.concatenate([logit[:, None], values], axis=1) - norm[:, None],
    )


def no_scores(num_places: int) -> TopLogprobs:
    """Zeros of the same shapes, for a launch without requests for log probabilities."""
    shape = (num_places, 1 + MAX_LOGPROBS)
    return TopLogprobs(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


class LogprobReader:
    """The values on the host, one place at a time."""

    def __init__(self, top: TopLogprobs, vocab_size: int) -> None:
        self._ids: Sequence[Sequence[int]] = np.asarray(top.ids).tolist()
        self._logprobs: Sequence[Sequence[float]] = np.asarray(top.logprobs).tolist()
        self._vocab_size = vocab_size

    def read(self, place: int, num_top: int) -> TokenLogprobs:
        """One token and the `num_top` most probable ones, or all of a smaller vocabulary."""
        (rank, *ids), (logprob, *logprobs) = self._ids[place], self._logprobs[place]
        count = min(num_top, self._vocab_size)
        return TokenLogprobs(logprob, rank, tuple(ids[:count]), tuple(logprobs[:count]))
