"""Rotary positions, and the scaling kinds that extend models to longer texts.

The kinds are those of Hugging Face configurations (`rope_type`). Frequencies are constants of a model, so a cached key
never has to be rotated again. In some kinds the frequencies change beyond a certain length of the text (`dynamic`,
`longrope`). They are used only up to this length; `families/shape.py` limits `max_positions` to it.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from orca_jax.model.layers import unfused
from orca_jax.values.layer_config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each pair of `head_dim` rotated dimensions, float32 [head_dim / 2]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # float32 as in training, but a power of it is off by some units of its last place in NumPy alone
    powers = np.power(np.float64(np.float32(rope.theta)), exponent).astype(np.float32)
    base: np.ndarray = 1.0 / powers
    match rope.kind:
        case "linear":
            base = base / rope.factor
        case "llama3":
            base = _llama3(base, rope)
        case "yarn":
            base = _yarn(base, rope, head_dim)
        case "longrope":
            base = base / np.asarray(rope.short_factor, np.float32)
        case "proportional":
            is_used = np.arange(len(base)) < int(rope.share * head_dim // 2)
            base = np.where(is_used, base, 0) / np.float32(rope.factor)
        case "default" | "dynamic":
            pass
    return base.astype(np.float32)


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Stretch long wavelengths by `factor`, keep short ones, and blend those between (Llama 3.1)."""
    turns = rope.original_max_position * base / (2 * math.pi)  # within the original context
    # 0 in Llama 4 Scout: nothing is blended
    between = max(rope.high_freq_factor - rope.low_freq_factor, 1e-9)
    keep = (turns - rope.low_freq_factor) / between
    keep = np.clip(keep, 0.0, 1.0)
    return base * (keep + (1 - keep) / rope.factor)


def _yarn(base: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Stretch dimensions with fewer than `beta_slow` turns, keep those above `beta_fast` (arXiv 2309.00071)."""

    def dimension(turns: float) -> float:
        ratio = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low = dimension(rope.beta_fast)
    high = dimension(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    width = high - low or 0.001
    stretch = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    return base * (1 - stretch) + base / rope.factor * stretch


def magnitude(rope: RopeConfig) -> float:
    """Factor on cosine and sine, which keeps attention as sharp as in the original context."""
    if rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "longrope":
        if rope.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    if rope.mscale and rope.mscale_all_dim:
        return rope.yarn_magnitude(rope.mscale) / rope.yarn_magnitude(rope.mscale_all_dim)
    return rope.yarn_magnitude(1.0)


class Rotation:
    """Cosine and sine of A angles of every token. R = 2 A dimensions of each head are rotated."""

    def __init__(
        self,
        dim: int,
        cos: Float[Array, "T 1 A"],
        sin: Float[Array, "T 1 A"],
        temperature: Float[Array, "T 1 1"] | None = None,
        unit_eps: float | Float[Array, ""] = 0.0,
    ) -> None:
        self.dim = dim
        self.cos = cos
        self.sin = sin
        self.temperature = temperature
        self.unit_eps = unit_eps

    def of_queries(self, query: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        """Rotate queries, and multiply them by the temperature of their positions."""
        return self.tempered(self(query))

    def tempered(self, query: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        """Multiply queries by the temperature of their positions, if there is one."""
        if self.temperature is None:
            return query
        return query * self.temperature

    def __call__(self, x: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        """Rotate the pairs (d, d + R/2) of every head, in float32. Dimensions from R on stay as they are.

        Heads are normalised before, if the layer has such norms.
        """
        if isinstance(self.unit_eps, jax.Array) or self.unit_eps:
            factors = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.unit_eps)
            x = x * jnp.where(self.unit_eps > 0, factors, 1.0)
        first, second = jnp.split(x[..., : self.dim], 2, axis=-1)
        rotated = first * self.cos - second * self.sin, second * self.cos + first * self.sin
        return jnp.concatenate([*rotated, x[..., self.dim :]], axis=-1)


class ChosenRotation(Rotation):
    """One of several rotations of different numbers of dimensions. The number of the chosen one is a traced scalar."""

    def __init__(self, kinds: Sequence[Rotation], number: Int[Array, ""]) -> None:
        self.temperature = None
        self.kinds = kinds
        self.number = number

    def __call__(self, x: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        """Rotate heads by all of them, and take the results of the chosen one."""
        return jax.lax.select_n(self.number, *(kind(x) for kind in self.kinds))


class Rotations:
    """The rotations of all layers. Those of each kind of rotary positions are computed once.

    Args:
        ropes: the rotary positions of each layer; None for none, and the layer then has a rotation by nothing.
        head_dim: D.
        positions: the positions of the tokens.
    """

    def __init__(
        self, ropes: Sequence[RopeConfig | None], head_dim: int, positions: Int[Array, "T"]
    ) -> None:
        kinds = tuple(dict.fromkeys(ropes))
        self._number = [kinds.index(rope) for rope in ropes]  # of the kind of each layer
        some = next(rope for rope in kinds if rope is not None)
        still = dataclasses.replace(
            RopeConfig(kind="proportional", share=0.0), rotated_dim=some.rotated_dim
        )
        self._kinds = [
            _rotation(still if rope is None else rope, head_dim, positions) for rope in kinds
        ]

    def of_layer(self, layer: int | Int[Array, ""]) -> Rotation:
        """The rotation of a layer; its index may be known only at run time."""
        if len(self._kinds) == 1:
            return self._kinds[0]
        if isinstance(layer, int):
            return self._kinds[self._number[layer]]
        number = jnp.asarray(self._number, jnp.int32)[layer]
        if len({kind.dim for kind in self._kinds}) > 1:
            return ChosenRotation(self._kinds, number)
        cos = jax.lax.select_n(number, *(kind.cos for kind in self._kinds))
        sin = jax.lax.select_n(number, *(kind.sin for kind in self._kinds))
        eps = [kind.unit_eps for kind in self._kinds]
        return Rotation(
            self._kinds[0].dim, cos, sin, unit_eps=jnp.asarray(eps)[number] if any(eps) else 0.0
        )


def _rotation(rope: RopeConfig, head_dim: int, positions: Int[Array, "T"]) -> Rotation:
    dim = rope.rotated_dim or head_dim
    angles = positions.astype(jnp.float32)[:, None] * frequencies(rope, dim)  # [T, R/2]
    cos = jnp.cos(angles)[:, None] * magnitude(rope)  # [T, 1, R/2]
    sin = jnp.sin(angles)[:, None] * magnitude(rope)
    if rope.is_reversed:
        sin = -sin
    if rope.temperature:
        steps = jnp.floor(positions / rope.original_max_position)
        temperature = (1 + rope.temperature * jnp.log1p(steps))[:, None, None]
        return Rotation(dim, *unfused((cos, sin, temperature)))
    return Rotation(
        dim, *unfused((cos, sin)), unit_eps=rope.unit_eps
    )  # otherwise a scan over layers would compute them in every layer
