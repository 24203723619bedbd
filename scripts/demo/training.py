"""Trains a decoder on packed rows for a given time: the learning rate is zero when the time is over."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, muon

from demo.data import Rows
from orca_jax.model.attention import Attend
from orca_jax.model.transformer import Decoder

Batch = dict[str, Array]

MUON_RATE = 0.02  # matrices of the blocks
ADAM_RATE = 0.003  # tables, norms and biases
WARM_UP_STEPS = 40
DECAY_FROM = 0.3  # share of the time after which the rate falls linearly to zero


def packed_attention(segments: Int[Array, "B S"]) -> Attend[tuple[()]]:
    """Dense causal attention within the segments of each row, without a cache."""
    length = segments.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    visible = (segments[:, None, :, None] == segments[:, None, None, :]) & causal  # [B, 1, S, S]

    def attend(
        layer: int | Int[Array, ""],
        q: Float[Array, "T H D"],
        k: Float[Array, "T H D"],
        v: Float[Array, "T H D"],
        cache: tuple[()],
    ) -> tuple[Float[Array, "T H D"], tuple[()]]:
        by_row = (*segments.shape, *q.shape[1:])
        q, k, v = (x.reshape(by_row) for x in (q, k, v))
        scores = jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5
        probabilities = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        return jnp.einsum("bhst,bthd->bshd", probabilities, v).reshape(-1, *by_row[2:]), cache

    return attend


def token_losses(decoder: Decoder, batch: Batch) -> Float[Array, "T"]:
    """Cross entropy of every target."""
    hidden, _ = decoder(
        batch["ids"].reshape(-1), batch["positions"].reshape(-1), packed_attention(batch["segments"]), ()
    )
    logits = decoder.unembed(hidden)
    padding = jnp.arange(logits.shape[-1]) >= decoder.config.vocab_size
    return optax.softmax_cross_entropy_with_integer_labels(
        jnp.where(padding, -1e30, logits), batch["targets"].reshape(-1)
    )


def optimizer() -> optax.GradientTransformation:
    """Muon for the matrices of the blocks, AdamW for the rest, both at a relative learning rate of one."""

    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda p: MuonDimensionNumbers(1, 2) if p.ndim == 3 else None, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        muon(
            MUON_RATE,
            adam_learning_rate=ADAM_RATE,
            adam_b2=0.95,
            weight_decay=0.02,
            muon_weight_dimension_numbers=matrices,
        ),
    )


def learning_rate(step: int, progress: float) -> float:
    """Relative learning rate after `step` steps, when `progress` of the time (0 to 1) is over."""
    return min((step + 1) / WARM_UP_STEPS, 1.0, max(1.0 - progress, 0.0) / (1 - DECAY_FROM))


class Trainer:
    """Owns parameters and optimizer state."""

    def __init__(self, decoder: Decoder) -> None:
        self._structure, self.params = nnx.split(decoder)
        self._optimizer = optimizer()
        self.state = jax.jit(self._optimizer.init)(self.params)
        self._update = jax.jit(self._make_update(), donate_argnums=(0, 1))
        self._losses = jax.jit(lambda params, batch: token_losses(nnx.merge(self._structure, params), batch))

    @property
    def decoder(self) -> Decoder:
        """The model with the current parameters."""
        decoder: Decoder = nnx.merge(self._structure, self.params)
        return decoder

    def _make_update(self) -> Callable[..., tuple[nnx.State, Any, Array]]:
        def loss(params: nnx.State, batch: Batch) -> Array:
            losses, weights = token_losses(nnx.merge(self._structure, params), batch), batch["weights"].reshape(-1)
            return (losses * weights).sum() / weights.sum()

        def update(params: nnx.State, state: Any, batch: Batch, rate: Array) -> tuple[nnx.State, Any, Array]:
            value, gradients = jax.value_and_grad(loss)(params, batch)
            updates, state = self._optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, jax.tree.map(lambda u: rate * u, updates))
            return params, state, value

        return update

    def step(self, rows: Rows, rate: float) -> float:
        """One update; returns the loss before it, in nats per token."""
        self.params, self.state, loss = self._update(self.params, self.state, _arrays(rows), jnp.float32(rate))
        return float(loss)

    def evaluate(self, batches: list[Rows]) -> dict[str, float]:
        """Mean loss of held-out answers and of held-out texts, in nats per token."""
        sums = np.zeros((2, 2))
        for rows in batches:
            losses = np.asarray(self._losses(self.params, _arrays(rows))).reshape(rows.ids.shape)
            is_text = rows.weights * (rows.answers.sum(axis=1, keepdims=True) == 0)
            for kind, mask in enumerate((rows.answers, is_text)):
                sums[kind] += (losses * mask).sum(), mask.sum()
        answers, texts = (float(total / max(count, 1.0)) for total, count in sums)
        return {"answer_loss": answers, "text_loss": texts}


def _arrays(rows: Rows) -> Batch:
    names = ("ids", "targets", "positions", "segments", "weights")
    return {name: jnp.asarray(getattr(rows, name)) for name in names}
