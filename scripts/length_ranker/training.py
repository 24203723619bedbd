"""Trains a ranker to order prompts by the lengths of their answers, from a log."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from length_ranker.log import Log
from length_ranker.ranker import Ranker, list_mle


@dataclass(frozen=True)
class Settings:
    """Settings of one training."""

    epochs: int = 16
    learning_rate: float = 3e-3
    weight_decay: float = 1.0
    token_dropout: float = 0.3  # hidden share of a prompt's tokens, against memorising words
    list_size: int = 32  # requests of one list; ListMLE orders them together
    lists: int = 8  # lists of one update
    seed: int = 0


def train(vectors: np.ndarray, log: Log, settings: Settings) -> Ranker:
    """Train a ranker with `settings.epochs` passes over the log.

    Args:
        vectors: the served model's embedding. float [V, E]
        log: the training data.
        settings: the settings of the training.
    """
    lists = min(settings.lists, len(log) // settings.list_size)
    size = lists * settings.list_size
    steps = settings.epochs * (len(log) // size)
    ranker = Ranker(jnp.asarray(vectors, jnp.float32), nnx.Rngs(settings.seed))
    schedule = optax.cosine_decay_schedule(settings.learning_rate, steps)
    optimizer = nnx.Optimizer(
        ranker, optax.adamw(schedule, weight_decay=settings.weight_decay), wrt=nnx.Param
    )
    random = np.random.default_rng(settings.seed)
    key = jax.random.key(settings.seed)
    for _ in range(settings.epochs):
        order = random.permutation(len(log))
        for start in range(0, len(log) - size + 1, size):
            key, draw = jax.random.split(key)
            batch = log.select(order[start : start + size])
            ids, is_token, lengths = (
                jnp.asarray(array) for array in (batch.ids, batch.is_token, batch.lengths)
            )
            _update(ranker, optimizer, ids, is_token, lengths, draw, settings.token_dropout, lists)
    return ranker


@nnx.jit(static_argnums=(6, 7))
def _update(
    ranker: Ranker,
    optimizer: nnx.Optimizer[Ranker],
    ids: jax.Array,
    is_token: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    dropout: float,
    lists: int,
) -> None:
    """One update from `lists` lists, side by side in the arrays. Dropout never hides a prompt's first token."""
    stays = jax.random.bernoulli(key, 1 - dropout, is_token.shape).at[:, 0].set(True)

    def loss(ranker: Ranker) -> jax.Array:
        scores = ranker(ids, is_token & stays).reshape(lists, -1)
        return jnp.mean(jax.vmap(list_mle)(scores, lengths.reshape(lists, -1)))

    optimizer.update(ranker, nnx.grad(loss)(ranker))


def scores_of(ranker: Ranker, log: Log, rows: int = 256) -> np.ndarray:
    """The scores of all prompts. float32 [N]"""
    parts = [slice(start, start + rows) for start in range(0, len(log), rows)]
    return np.concatenate(
        [np.asarray(ranker(jnp.asarray(log.ids[p]), jnp.asarray(log.is_token[p]))) for p in parts]
    )
