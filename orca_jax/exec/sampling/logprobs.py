"""Log probabilities and logits of tokens, by the setting `logprobs_mode`, whose values are those of vLLM.

- raw: under the model's own distribution, before bias, penalties, masks, temperature and filters.
- processed: under the distribution that a token is drawn from; minus infinity for those that filters leave out. The
  tokens of a prompt have temperature and filters of their request. Temperature 0 changes and filters nothing.

Listed ids are always scored under the model's own distribution.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from orca_jax.exec.rows import Extras, SamplingParameters
from orca_jax.exec.sampling.adjust import column_of
from orca_jax.exec.sampling.draw import VocabularyShards, without_filtered
from orca_jax.values.config import LogprobsMode
from orca_jax.values.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, TokenLogprobs


class TopLogprobs(NamedTuple):
    """Log probabilities of each place: the scored token in the first column, then the most probable ones."""

    ids: Int[Array, "B K"]  # the first column holds the token's rank
    logprobs: Float[Array, "B K"]


class ListedLogprobs(NamedTuple):
    """Log probabilities of the ids that each place lists, and the probability of all other tokens together."""

    logprobs: Float[Array, "B M"]  # those of ids that are not to be scored have no meaning
    others: Float[Array, " B"]


class TokenScores(NamedTuple):
    """Everything that a sampler scores."""

    top: TopLogprobs
    listed: ListedLogprobs


def score(
    logits: Float[Array, "B N"],
    changed: Float[Array, "B N"],
    chosen: Int[Array, " B"],
    parameters: SamplingParameters,
    extras: Extras,
    shards: VocabularyShards,
    mode: LogprobsMode = "raw_logprobs",
) -> TokenScores:
    """TokenScores of one token of each row, of the most probable tokens, and of listed ones, from N of the columns.

    Args:
        logits: the logits of the model, unchanged but for minus infinity in the columns of padding.
        changed: the logits after biases, penalties and masks.
        chosen: the tokens to score.
        parameters: temperatures and filters.
        extras: the ids that rows list. What no row wants is not computed, and is zero.
        shards: the parts of the columns.
        mode: the values of the chosen and the most probable tokens.
    """
    nothing = no_scores(logits.shape[0])
    raw_norm = _norm(logits, shards)
    values_of, norm = logits, raw_norm
    if mode.startswith("processed"):
        drawn = jnp.where(extras.has_target != 0, -1, chosen)
        values_of = without_filtered(changed, drawn, parameters, shards)
        norm = _norm(values_of, shards)
    if mode.endswith("logits"):
        norm = jnp.zeros_like(norm)
    logit = _logits_of(values_of, chosen[:, None], shards)[:, 0]
    rank = shards.count(values_of > logit[:, None]) + 1

    def candidates() -> tuple[Float[Array, "B K"], Int[Array, "B K"]]:
        values, ids = shards.candidates(values_of, MAX_LOGPROBS)
        return values - norm[:, None], ids

    values, ids = lax.cond(
        jnp.any(extras.wants_top != 0),
        candidates,
        lambda: (nothing.top.logprobs[:, 1:], nothing.top.ids[:, 1:]),
    )
    listed = lax.cond(
        jnp.any(extras.num_scored > 0),
        lambda: _score_listed(logits, raw_norm, extras, shards),
        lambda: nothing.listed,
    )
    whole = TopLogprobs(
        jnp.concatenate([rank[:, None], ids], axis=1),
        jnp.concatenate([(logit - norm)[:, None], values], axis=1),
    )
    return TokenScores(whole, listed)


def _norm(logits: Float[Array, "B N"], shards: VocabularyShards) -> Float[Array, " B"]:
    """The logarithm of the sum of exponentials of each row."""
    _, top = shards.most_probable(logits)
    norm: Array = top + jnp.log(shards.total(jnp.exp(logits - top[:, None])))
    return norm


def _score_listed(
    logits: Float[Array, "B N"],
    norm: Float[Array, " B"],
    extras: Extras,
    shards: VocabularyShards,
) -> ListedLogprobs:
    """TokenScores of the listed ids, and the mass without them."""
    width, num_columns = logits.shape
    is_scored = jnp.arange(extras.listed_id.shape[1]) < extras.num_scored[:, None]
    column = column_of(extras.listed_id, shards.first_column(logits), num_columns)
    dropped = jnp.where(is_scored, column, num_columns)
    rest = logits.at[jnp.arange(width)[:, None], dropped].set(-jnp.inf, mode="drop")
    values = _logits_of(logits, extras.listed_id, shards)
    others = shards.total(jnp.exp(rest - norm[:, None]))
    return ListedLogprobs(values - norm[:, None], others)


def _logits_of(
    logits: Float[Array, "B N"], ids: Int[Array, "B M"], shards: VocabularyShards
) -> Float[Array, "B M"]:
    """The logits of some ids of each row, on all shards."""
    column = column_of(ids, shards.first_column(logits), logits.shape[1])
    is_here = column < logits.shape[1]
    here = jnp.take_along_axis(logits, jnp.where(is_here, column, 0), axis=1)
    return lax.psum(jnp.where(is_here, here, 0.0), shards.axis)


def no_scores(width: int) -> TokenScores:
    """Zeros of the same shapes, for a launch without requests for log probabilities."""
    shape = (width, 1 + MAX_LOGPROBS)
    top = TopLogprobs(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    listed = jnp.zeros((width, MAX_LOGIT_BIAS), jnp.float32)
    return TokenScores(top, ListedLogprobs(listed, jnp.zeros(width, jnp.float32)))


class LogprobReader:
    """Log probabilities on the host, read one place at a time.

    Args:
        scores: those of a launch.
        vocab_size: the number of tokens.
        has_listed: True if a place lists ids to score; else their scores stay on the device.
    """

    def __init__(self, scores: TokenScores, vocab_size: int, *, has_listed: bool = False) -> None:
        self._ids: Sequence[Sequence[int]] = np.asarray(scores.top.ids).tolist()
        self._logprobs: Sequence[Sequence[float]] = np.asarray(scores.top.logprobs).tolist()
        self._vocab_size = vocab_size
        self._listed: Sequence[Sequence[float]] = ()
        self._others: Sequence[float] = ()
        if has_listed:
            self._listed = np.asarray(scores.listed.logprobs).tolist()
            self._others = np.asarray(scores.listed.others).tolist()

    def read(self, place: int, num_top: int) -> TokenLogprobs:
        """One token and the `num_top` most probable ones, or all of a smaller vocabulary."""
        (rank, *ids), (logprob, *logprobs) = self._ids[place], self._logprobs[place]
        count = min(num_top, self._vocab_size)
        return TokenLogprobs(logprob, rank, tuple(ids[:count]), tuple(logprobs[:count]))

    def read_listed(self, place: int, ids: Sequence[int]) -> TokenLogprobs:
        """One token, and the ids that its place lists."""
        found = tuple(self._listed[place][: len(ids)])
        one = self.read(place, 0)
        return TokenLogprobs(one.logprob, one.rank, tuple(ids), found, self._others[place])
