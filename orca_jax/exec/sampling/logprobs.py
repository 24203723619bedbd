"""Log probabilities under the model's own distribution: before bias, penalties, masks, temperature and filters."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from orca_jax.exec.sampling.draw import first_column
from orca_jax.step import MAX_LOGPROBS, TokenLogprobs


class Told(NamedTuple):
    """What is told of each place; the first column is the token in question, the others the most probable ones."""

    ids: Int[Array, "B K"]  # the first column holds the token's rank
    logprobs: Float[Array, "B K"]


def tell(logits: Float[Array, "B N"], chosen: Int[Array, " B"], axis: str) -> Told:
    """Log probability and rank of a token of each row, and the most probable ones; from N of the columns.

    Args:
        logits: as the model gave them, minus infinity for tokens that do not exist.
        chosen: the tokens in question.
        axis: over which the columns are sharded.
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
    values, places = lax.top_k(values, MAX_LOGPROBS)  # of equals the lower id, since shards are in order
    ids = jnp.take_along_axis(ids, places, axis=1)
    return Told(
        jnp.concatenate([better[:, None] + 1, ids], axis=1),
        jnp.concatenate([logit[:, None], values], axis=1) - norm[:, None],
    )


def tell_nothing(num_places: int) -> Told:
    """The same shapes, where nobody asked."""
    shape = (num_places, 1 + MAX_LOGPROBS)
    return Told(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


class LogprobReader:
    """Told values on the host, a place at a time."""

    def __init__(self, told: Told, vocab_size: int) -> None:
        self._ids: Sequence[Sequence[int]] = np.asarray(told.ids).tolist()
        self._logprobs: Sequence[Sequence[float]] = np.asarray(told.logprobs).tolist()
        self._vocab_size = vocab_size

    def read(self, place: int, num_top: int) -> TokenLogprobs:
        """One token and as many of the most probable ones as are wanted and exist."""
        (rank, *ids), (logprob, *logprobs) = self._ids[place], self._logprobs[place]
        count = min(num_top, self._vocab_size)
        return TokenLogprobs(logprob, rank, tuple(ids[:count]), tuple(logprobs[:count]))
