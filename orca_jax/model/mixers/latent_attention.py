"""Latent attention: all heads share one vector of each token in the cache (DeepSeek-V2, arXiv 2405.04434).

The vector is a latent and a rotated key. The keys and values of a head are products of the latent with the weights
`up`. These products are moved to the other side of attention: queries are multiplied by the part for keys, and results
by the part for values. So attention runs over the latents themselves, in prompts and in increments alike.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.kernels.matmul import product_of_heads
from orca_jax.model.layers import Linear, Norm, kept, project
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.maker import Maker
from orca_jax.model.mixers.base import Index, Mixing
from orca_jax.model.rope import Rotation
from orca_jax.values.config import ModelConfig

type LatentInputs = tuple[Float[Array, "T H C"], Float[Array, "T K C"]]
"""Queries in the space of latents, and the vector of each token, in copies for the devices. C has both parts."""


class LatentAttention(nnx.Module):
    """Projections to latents and to queries, with their norms and rotary positions, and back."""

    def __init__(self, make: Maker, config: ModelConfig, out_std: float) -> None:
        assert config.latent is not None, "the configuration has the sizes of latents"
        self.sizes = config.latent
        self.num_heads = config.num_heads
        self.num_copies = config.num_kv_heads
        # dimensions of a query that are not rotated
        self.plain = config.head_dim - config.latent.rotated_dim
        embed = config.embed_dim
        rank = config.latent.rank
        inner = config.latent.query_rank
        bias = config.attention_bias
        self.query_down: Linear | None = nnx.data(None)
        self.query_norm: Norm | None = nnx.data(None)
        queries = config.num_heads * config.head_dim
        if inner is None:
            self.query = Linear(make, (embed, queries), ("embed", "heads"), bias=False)
        else:
            self.query_down = nnx.data(Linear(make, (embed, inner), ("embed", "latent"), bias=bias))
            self.query_norm = nnx.data(self._norm(make, config, inner))
            self.query = Linear(make, (inner, queries), ("latent", "heads"), bias=False)
        self.latent = Linear(make, (embed, rank), ("embed", "latent"), bias=bias)
        self.latent_norm = self._norm(make, config, rank)
        self.rotated_key = Linear(
            make, (embed, self.sizes.rotated_dim), ("embed", "latent"), bias=bias
        )
        self.up = make(
            (self.num_heads * (self.plain + self.sizes.value_dim), rank),
            ("heads", "latent"),
            "normal",
        )
        heads = config.num_heads * self.sizes.value_dim
        self.out = Linear(
            make, (heads, embed), ("heads", "embed"), bias=config.attention_out_bias, std=out_std
        )

    def _norm(self, make: Maker, config: ModelConfig, width: int) -> Norm:
        norm = Norm(make, config, width, "latent")
        norm.eps = self.sizes.norm_eps
        return norm

    @property
    def linear_layers(self) -> list[Linear]:
        """The linear layers. The weights `up` are not among them: they have products of their own."""
        layers = [self.query, self.latent, self.rotated_key, self.out]
        return [*filter(None, [self.query_down]), *layers]

    def project(
        self,
        x: Float[Array, "T E"],
        rotation: Rotation | None,
        adapters: LayerAdapters | None = None,
    ) -> LatentInputs:
        """The inputs of every token. There are no `adapters`: assembly/support.py refuses them."""
        assert rotation is not None, "families with latents have rotary positions"
        first, latent, key = project(
            x, [self.query_down or self.query, self.latent, self.rotated_key]
        )
        if self.query_norm is not None:
            first = self.query(self.query_norm(first))
        query = first.reshape(x.shape[0], self.num_heads, -1)
        plain = product_of_heads(
            "thn,hnc->thc", query[..., : self.plain], self._weights[:, : self.plain]
        )
        rotated = rotation(query[..., self.plain :])
        queries = rotation.tempered(jnp.concatenate([plain, rotated], axis=-1))
        own = jnp.concatenate([self.latent_norm(latent)[:, None], rotation(key[:, None])], axis=-1)
        return queries, jnp.broadcast_to(own, (x.shape[0], self.num_copies, own.shape[-1]))

    @property
    def _weights(self) -> Float[Array, "H N C"]:
        """The weights `up` of each head: those of keys, and behind them those of values."""
        up = self.up[...]
        return up.reshape(self.num_heads, -1, up.shape[-1])

    def mix[Cache](
        self, inputs: LatentInputs, layer: Index, mixing: Mixing[Cache], cache: Cache
    ) -> tuple[Float[Array, "T H C"], Cache]:
        """Attend over the latents of the layer, after writing the new ones to its pages."""
        return mixing.attend(layer, *inputs, None, cache)

    def merge(
        self,
        out: Float[Array, "T H C"],
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
    ) -> Float[Array, "B E"]:
        """The values of every token's heads, or of those in `keep`, projected back."""
        latents = kept(out, keep)[..., : self.sizes.rank]
        values = product_of_heads("thc,hnc->thn", latents, self._weights[:, self.plain :])
        return self.out(values.reshape(values.shape[0], -1))
