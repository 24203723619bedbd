"""Trains a decoder on packed rows for a given time: the learning rate is zero when the time is over."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from optax.contrib import MuonDimensionNumbers, muon

from demo.data import Rows
from orca_jax.model.block import Block
from orca_jax.model.mixers.base import Attend
from orca_jax.model.transformer import Decoder

Batch = dict[str, Array]

MUON_RATE = 0.012  # matrices of the blocks
ADAM_RATE = 0.002  # tables, norms and biases
WARM_UP_STEPS = 60

REPLICATED = PartitionSpec()
SPLIT = PartitionSpec("data")


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


def token_logits(decoder: Decoder, batch: Batch) -> Float[Array, "T V"]:
    """The logits of every place, without the padding of the vocabulary.

    The layers are unrolled: the backward pass of a scan copies the values that each layer keeps for it.
    """
    if isinstance(decoder.blocks, Block):
        decoder.unstack()
    hidden, _ = decoder(
        batch["ids"].reshape(-1),
        batch["positions"].reshape(-1),
        packed_attention(batch["segments"]),
        (),
    )
    logits = decoder.unembed(hidden)
    return jnp.where(jnp.arange(logits.shape[-1]) >= decoder.config.vocab_size, -1e30, logits)


def token_losses(decoder: Decoder, batch: Batch) -> Float[Array, "T"]:
    """Cross entropy of every target."""
    return optax.softmax_cross_entropy_with_integer_labels(
        token_logits(decoder, batch), batch["targets"].reshape(-1)
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
            adam_b2=0.98,
            weight_decay=0.02,
            muon_weight_dimension_numbers=matrices,
        ),
    )


def learning_rate(step: int, progress: float, decay_from: float) -> float:
    """Relative learning rate after `step` steps, when `progress` of the time (0 to 1) is over.

    It falls linearly to zero from the share `decay_from` of the time on.
    """
    return min((step + 1) / WARM_UP_STEPS, 1.0, max(1.0 - progress, 0.0) / (1 - decay_from))


class Trainer:
    """Owns parameters and optimizer state. The rows of a batch are divided among the devices.

    Args:
        decoder: the model, with its initial values.
        devices: each computes a part of every batch; the number of rows is divisible by their number.
    """

    def __init__(self, decoder: Decoder, devices: Sequence[jax.Device]) -> None:
        self._structure, params = nnx.split(decoder)
        self._mesh = Mesh(np.asarray(devices), ("data",))
        self._optimizer = optimizer()
        everywhere = NamedSharding(self._mesh, REPLICATED)
        self.params = jax.device_put(params, everywhere)
        self.state = jax.jit(self._optimizer.init, out_shardings=everywhere)(self.params)
        self._update = jax.jit(self._make_update(), donate_argnums=(0, 1), out_shardings=everywhere)
        self._scores = jax.jit(self._score)

    @property
    def decoder(self) -> Decoder:
        """The model with the current parameters, on the first device."""
        params = jax.device_put(self.params, self._mesh.devices.flat[0])
        decoder: Decoder = nnx.merge(self._structure, params)
        return decoder

    def _gradients(self, params: nnx.State, batch: Batch) -> tuple[Array, nnx.State]:
        """The mean loss of a batch and its gradients, as seen by one device with its part of the rows."""
        total = jax.lax.psum(batch["weights"].sum(), "data")

        def loss(params: nnx.State) -> Array:
            losses = token_losses(nnx.merge(self._structure, params), batch)
            return (losses * batch["weights"].reshape(-1)).sum() / total

        return jax.lax.psum(jax.value_and_grad(loss)(params), "data")

    def _make_update(self) -> Callable[..., tuple[nnx.State, Any, Array]]:
        gradients_of = jax.shard_map(
            self._gradients,
            mesh=self._mesh,
            in_specs=(REPLICATED, SPLIT),
            out_specs=(REPLICATED, REPLICATED),
            check_vma=False,
        )

        def update(
            params: nnx.State, state: Any, batch: Batch, rate: Array
        ) -> tuple[nnx.State, Any, Array]:
            value, gradients = gradients_of(params, batch)
            gradients = jax.tree.map(self._by_layers, gradients)
            updates, state = self._optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, jax.tree.map(lambda u: rate * u, updates))
            return params, state, value

        return update

    def _by_layers(self, gradient: Array) -> Array:
        """Divide the optimizer's work on the matrices of the layers among the devices."""
        if gradient.ndim < 3 or gradient.shape[0] % self._mesh.size:
            return gradient
        return jax.lax.with_sharding_constraint(gradient, NamedSharding(self._mesh, SPLIT))

    def _score(self, params: nnx.State, batch: Batch) -> tuple[Array, Array]:
        logits = token_logits(nnx.merge(self._structure, params), batch)
        targets = batch["targets"].reshape(-1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return losses, jnp.argmax(logits, axis=-1) == targets

    def step(self, rows: Rows, rate: float) -> float:
        """One update; returns the loss before it, in nats per token."""
        batch = jax.device_put(_arrays(rows), NamedSharding(self._mesh, SPLIT))
        self.params, self.state, loss = self._update(
            self.params, self.state, batch, jnp.float32(rate)
        )
        return float(loss)

    def scores(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """The loss of each target, and whether it is the most likely token; both [rows, length]."""
        losses, hits = self._scores(self.params, _arrays(rows))
        return np.asarray(losses).reshape(rows.ids.shape), np.asarray(hits).reshape(rows.ids.shape)


def _arrays(rows: Rows) -> Batch:
    names = ("ids", "targets", "positions", "segments", "weights")
    return {name: jnp.asarray(getattr(rows, name)) for name in names}
