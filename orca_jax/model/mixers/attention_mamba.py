"""Attention and Mamba-2 side by side in one layer, on the same inputs: the sum of both."""

from typing import Any

from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.model.layers import Linear
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.maker import Maker
from orca_jax.model.mixers.attention import Attention
from orca_jax.model.mixers.base import Index, Mixing
from orca_jax.model.mixers.mamba import Mamba
from orca_jax.model.rope import Rotation
from orca_jax.values.config import ModelConfig


class _MambaPart(Mamba):
    name = "attention_mamba"


class AttentionMamba(nnx.Module):
    """Both mixers, each with its parameters. The layer has pages and a state."""

    def __init__(self, make: Maker, config: ModelConfig, out_std: float) -> None:
        self.attention = Attention(make, config, out_std)
        self.mamba = _MambaPart(make, config, out_std)

    @property
    def linear_layers(self) -> list[Linear]:
        """The linear layers."""
        return [*self.attention.linear_layers, *self.mamba.linear_layers]

    def project(
        self,
        x: Float[Array, "T E"],
        rotation: Rotation | None,
        adapters: LayerAdapters | None = None,
    ) -> tuple[Any, Any]:
        """The inputs of both. There are no `adapters`: assembly/support.py refuses them."""
        return self.attention.project(x, rotation), self.mamba.project(x, rotation)

    def mix[Cache](
        self, inputs: tuple[Any, Any], layer: Index, mixing: Mixing[Cache], cache: Cache
    ) -> tuple[tuple[Any, Any], Cache]:
        """Attend over the pages, and run the recurrence."""
        attended, cache = self.attention.mix(inputs[0], layer, mixing, cache)
        results, cache = self.mamba.mix(inputs[1], layer, mixing, cache)
        return (attended, results), cache

    def merge(
        self,
        out: tuple[Any, Any],
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
    ) -> Float[Array, "B E"]:
        """The sum of both results of every token, or of those in `keep`."""
        return self.attention.merge(out[0], keep) + self.mamba.merge(out[1], keep)
