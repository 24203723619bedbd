"""Inputs of layers beside the residual stream: for each token a vector for each layer (Gemma 3n and 4)."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.model.layers import ACTIVATIONS, Linear, Norm, Table
from orca_jax.model.maker import Maker
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import LayerInputs


class InputsOfLayers(nnx.Module):
    """The mean, up to a factor, of a table's rows and of a projection of the embeddings, which has a norm."""

    def __init__(self, make: Maker, config: ModelConfig, sizes: LayerInputs) -> None:
        self.width = sizes.width
        self.scale = config.embed_dim**-0.5
        whole = config.num_layers * sizes.width
        self.table = Table(make, sizes.vocab_size, whole, "ids")
        self.table_scale = float(np.float32(sizes.width**0.5).astype(make.dtype))
        self.projection = Linear(make, (config.embed_dim, whole), ("embed", "latent"), bias=False)
        self.norm = Norm(make, config, sizes.width, "head_dim")

    def __call__(
        self, ids: Int[Array, "T"], embedded: Float[Array, "T E"]
    ) -> Float[Array, "L T P"]:
        """The vectors of all layers."""
        of_ids = self.table(ids) * self.table_scale
        of_vectors = self.norm.of_groups(self.projection(embedded) * self.scale)
        vectors = ((of_ids + of_vectors) * 2**-0.5).reshape(ids.shape[0], -1, self.width)
        return jnp.swapaxes(vectors, 0, 1)


class GatedInput(nnx.Module):
    """A layer's inputs weighted by a projection of the stream, then projected to it, and a norm."""

    def __init__(self, make: Maker, config: ModelConfig, sizes: LayerInputs) -> None:
        self.activation = config.activation
        self.gate = Linear(make, (config.embed_dim, sizes.width), ("embed", "latent"), bias=False)
        self.projection = Linear(
            make, (sizes.width, config.embed_dim), ("latent", "embed"), bias=False
        )
        self.norm = Norm(make, config)

    @property
    def linear_layers(self) -> list[Linear]:
        """The linear layers."""
        return [self.gate, self.projection]

    def __call__(self, x: Float[Array, "B E"], inputs: Float[Array, "B P"]) -> Float[Array, "B E"]:
        """What is added to the stream."""
        return self.norm(self.projection(ACTIVATIONS[self.activation](self.gate(x)) * inputs))
