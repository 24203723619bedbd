"""The online softmax of both TPU kernels, with its sums in VMEM."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from orca_jax.kernels.ragged_attention.tpu.shape import LANES, Shape

_LOG2E = math.log2(math.e)
_MASKED = -1e30  # finite: a fully masked block must not make NaN out of inf - inf


@dataclass(frozen=True)
class Softmax:
    """Of some queries: their maximum in every lane of `top`, sums over tokens, weighted values.

    Lanes are crossed for the maximum alone: what is the same in all lanes needs no broadcast, and `total` has a sum
    for each lane until the end. Both would cost as many cycles as a product.
    """

    shape: Shape
    top: Any
    total: Any
    values: Any

    def clear(self) -> None:
        """Begin anew."""
        self.top[...] = jnp.full_like(self.top, _MASKED)
        self.total[...] = jnp.zeros_like(self.total)
        self.values[...] = jnp.zeros_like(self.values)

    def add(
        self,
        index: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        visible: jax.Array | None,
        scales: tuple[jax.Array, jax.Array] | None = None,
    ) -> None:
        """Take `k` and `v` `[tokens, lanes]` into the sums of the queries `q [M, lanes]`.

        Args:
            index: of these queries' sums.
            q: queries, scaled.
            k: keys.
            v: values.
            visible: which tokens each query sees `[M, tokens]`; None where all see everything.
            scales: of K and of V `[M, tokens]`, where `k` and `v` do not have theirs in them.
        """
        shape = self.shape
        product = partial(lax.dot_general, precision=shape.precision, preferred_element_type=jnp.float32)
        scores = product(q, k, (((1,), (1,)), ((), ())))
        if scales is not None:
            scores = scores * scales[0]
        if shape.soft_cap is not None:
            scores = shape.soft_cap * _LOG2E * jnp.tanh(scores / shape.soft_cap)
        if visible is not None:
            scores = jnp.where(visible, scores, _MASKED)
        before = self.top[index]
        top = jnp.maximum(before, jnp.broadcast_to(scores.max(axis=1, keepdims=True), before.shape))
        weights = jnp.exp2(scores - _repeat(top, scores.shape[1]))
        if visible is not None:
            weights = jnp.where(visible, weights, 0.0)
        shrink = jnp.exp2(before - top)
        scaled = weights if scales is None else weights * scales[1]
        weighted = product(scaled.astype(v.dtype), v, (((1,), (0,)), ((), ())))
        lanes = v.shape[1]
        self.values[index, :, :lanes] = self.values[index, :, :lanes] * _repeat(shrink, lanes) + weighted
        self.top[index] = top
        self.total[index] = self.total[index] * shrink + _sum_of_registers(weights)

    def result(self) -> jax.Array:
        """The weighted means; zeros for queries that saw nothing."""
        total = self.total[...].sum(axis=2, keepdims=True)
        return self.values[...] / jnp.where(total > 0.0, total, 1.0)


def _repeat(x: jax.Array, width: int) -> jax.Array:
    """`x [M, 128]`, the same in all lanes, with `width` of them."""
    return x[:, :width] if width <= LANES else jnp.concatenate([x] * pl.cdiv(width, LANES), axis=1)[:, :width]


def _sum_of_registers(x: jax.Array) -> jax.Array:
    """`[M, 128]`, whose sum over lanes is that of `x [M, N]`."""
    size = x.shape[1] // LANES * LANES
    parts = [x[:, first : first + LANES] for first in range(0, size, LANES)]
    if size < x.shape[1]:
        is_first = lax.broadcasted_iota(jnp.int32, (x.shape[0], LANES), 1) == 0
        parts.append(jnp.where(is_first, x[:, size:].sum(axis=1, keepdims=True), 0.0))
    return sum(parts[1:], parts[0])
