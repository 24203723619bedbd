"""The mixer of layers that are an MLP alone: each token is by itself."""

from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.model.layers import Linear, kept
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.maker import Maker
from orca_jax.model.mixers.base import Index, Mixing
from orca_jax.model.rope import Rotation
from orca_jax.values.config import ModelConfig


class NoMixer(nnx.Module):
    """No parameters, and inputs as results."""

    def __init__(self, make: Maker, config: ModelConfig, out_std: float) -> None:
        """There is nothing to make."""

    @property
    def linear_layers(self) -> list[Linear]:
        """There are none."""
        return []

    def project(
        self,
        x: Float[Array, "T E"],
        rotation: Rotation | None,
        adapters: LayerAdapters | None = None,
    ) -> Float[Array, "T E"]:
        """The normalised tokens, as they are."""
        return x

    def mix[Cache](
        self, inputs: Float[Array, "T E"], layer: Index, mixing: Mixing[Cache], cache: Cache
    ) -> tuple[Float[Array, "T E"], Cache]:
        """The tokens, and the cache as it is."""
        return inputs, cache

    def merge(
        self,
        out: Float[Array, "T E"],
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
    ) -> Float[Array, "B E"]:
        """Every token or those in `keep`."""
        return kept(out, keep)
