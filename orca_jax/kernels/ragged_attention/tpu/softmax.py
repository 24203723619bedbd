"""The online softmax of both TPU kernels, with its running sums in VMEM."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from orca_jax.kernels.ragged_attention.tpu.shape import LANES, TpuShape

_LOG2E = math.log2(math.e)
_MASKED = -1e30  # finite: a fully masked part must not give NaN from inf - inf


@dataclass(frozen=True)
class TpuSoftmax:
    """Running maximum, sum of weights, and weighted values of some queries.

    Only the maximum is reduced across lanes. `top` holds it in every lane, so it needs no broadcast; `total` keeps one
    sum per lane until the end. A broadcast or a sum across lanes would cost as many cycles as a product.
    """

    shape: TpuShape
    top: Any
    total: Any
    values: Any
    # their scores in all lanes, for the first queries; those of the next ones repeat them
    sinks: Any = None

    def of_row(self, row: jax.Array) -> "TpuSoftmax":
        """The sums of one row, of those of several."""
        return TpuSoftmax(
            self.shape, self.top.at[row], self.total.at[row], self.values.at[row], self.sinks
        )

    def clear(self) -> None:
        """Reset all sums to those of no token, or of the sinks."""
        self.values[...] = jnp.zeros_like(self.values)
        if self.sinks is None:
            self.top[...] = jnp.full_like(self.top, _MASKED)
            self.total[...] = jnp.zeros_like(self.total)
            return
        self.total[...] = jnp.full_like(self.total, 1 / LANES)
        size = self.sinks.shape[1]

        def put(index: jax.Array, _: None) -> None:
            self.top[:, pl.ds(pl.multiple_of(index * size, size), size)] = self.sinks[...]

        lax.fori_loop(0, self.top.shape[1] // size, put, None)

    def add_tokens(
        self,
        index: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        visible: jax.Array | None,
        scales: tuple[jax.Array, jax.Array] | None = None,
    ) -> None:
        """Add the tokens of `k` and `v` `[tokens, lanes]` to the sums of the queries `q [M, lanes]`.

        Args:
            index: index of the sums of these queries.
            q: queries, scaled.
            k: keys.
            v: values.
            visible: mask `[M, tokens]` of the tokens visible to each query; None if every query sees all of them.
            scales: scales of K and of V `[M, tokens]`; None if `k` and `v` are already multiplied by theirs.
        """
        scores = self.product(q, k, (((1,), (1,)), ((), ())))
        if scales is not None:
            scores = scores * scales[0]

        def weighted(weights: jax.Array) -> jax.Array:
            scaled = weights if scales is None else weights * scales[1]
            return self.product(scaled.astype(v.dtype), v, (((1,), (0,)), ((), ())))

        self.add_scores(index, scores, visible, weighted)

    @property
    def product(self) -> Callable[..., jax.Array]:
        """Multiplies matrices, with sums in float32."""
        return partial(
            lax.dot_general, precision=self.shape.precision, preferred_element_type=jnp.float32
        )

    def add_scores(
        self,
        index: int,
        scores: jax.Array,
        visible: jax.Array | None,
        weighted: Callable[[jax.Array], jax.Array],
    ) -> None:
        """Add tokens by their scores `[M, tokens]`, neither capped nor masked, to the sums of these queries.

        Args:
            index: index of the sums.
            scores: products of queries and keys.
            visible: mask of the tokens visible to each query; None if every query sees all of them.
            weighted: the sums of the values by their weights.
        """
        shape = self.shape
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
        added = weighted(weights)
        lanes = added.shape[1]
        self.values[index, :, :lanes] = (
            self.values[index, :, :lanes] * _repeat(shrink, lanes) + added
        )
        self.top[index] = top
        self.total[index] = self.total[index] * shrink + _sum_of_registers(weights)

    def result(self) -> jax.Array:
        """The weighted means; zeros for queries without a visible token."""
        total = self.total[...].sum(axis=-1, keepdims=True)
        return self.values[...] / jnp.where(total > 0.0, total, 1.0)


def _repeat(x: jax.Array, width: int) -> jax.Array:
    """Widen `x [M, 128]`, equal in all lanes, to `width` lanes."""
    if width <= LANES:
        return x[:, :width]
    return jnp.concatenate([x] * pl.cdiv(width, LANES), axis=1)[:, :width]


def _sum_of_registers(x: jax.Array) -> jax.Array:
    """Add up the registers of `x [M, N]`: the sum over lanes of the result `[M, 128]` is that of `x`."""
    size = x.shape[1] // LANES * LANES
    parts = [x[:, first : first + LANES] for first in range(0, size, LANES)]
    if size < x.shape[1]:
        is_first = lax.broadcasted_iota(jnp.int32, (x.shape[0], LANES), 1) == 0
        parts.append(jnp.where(is_first, x[:, size:].sum(axis=1, keepdims=True), 0.0))
    return sum(parts[1:], parts[0])
