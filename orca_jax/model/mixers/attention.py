"""Attention over keys and values: projections with their norms and rotary positions, and back."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.model.layers import Linear, Norm, kept, project, unfused, with_adapters
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.maker import Maker, optional
from orca_jax.model.mixers.base import Index, Mixing
from orca_jax.model.parameters import copied_columns
from orca_jax.model.rope import Rotation
from orca_jax.values.config import ModelConfig
from orca_jax.values.layer_config import SHARED_MIXERS, MixerName

type Projections = tuple[
    Float[Array, "T H D"],
    Float[Array, "T K D"] | None,
    Float[Array, "T K D"] | None,
    Float[Array, "T H G"] | None,
    Float[Array, " H"] | None,
]
"""Queries; keys and values, if the layer has some; weights of outputs, one for each head or D; sinks of heads."""

_GATES = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}


class Attention(nnx.Module):
    """Projections to queries, keys and values, their norms and rotary positions if the model has them, and back.

    Args:
        make: maker of the parameters.
        config: the model.
        out_std: standard deviation of the weights back.
        mixer: the kind: of wide heads, or without keys and values of its own.
    """

    def __init__(
        self, make: Maker, config: ModelConfig, out_std: float, mixer: MixerName = "attention"
    ) -> None:
        has_values = (
            config.wide is None or not mixer.startswith("wide_") or not config.wide.keys_are_values
        )
        config = config.of_mixer(mixer)
        has_keys = mixer not in SHARED_MIXERS
        self.head_dim = config.head_dim
        embed = config.embed_dim
        heads = config.num_heads * config.head_dim
        inputs = _input_width(config)
        self.in_norm = optional(inputs != embed, Norm, make, config, inputs)
        self.query = Linear(make, (inputs, heads), ("embed", "heads"), bias=config.attention_bias)
        self.key = optional(has_keys, _kv_projection, make, config)
        self.value = optional(has_keys and has_values, _kv_projection, make, config)
        self.query_norm = nnx.data(_head_norm(make, config, config.num_heads, "heads"))
        kv_heads = config.num_kv_heads
        self.key_norm = optional(has_keys, _head_norm, make, config, kv_heads, "kv_heads")
        has_norm = config.value_norm and has_keys
        width = config.head_dim
        self.value_norm = optional(has_norm, Norm, make, config, width, "head_dim", has_scale=False)
        self.out = Linear(
            make, (heads, embed), ("heads", "embed"), bias=config.attention_out_bias, std=out_std
        )
        shape = (config.num_heads,)
        self.sinks = optional(config.attention_sinks, make, shape, ("heads",), "zeros")
        self.num_heads = config.num_heads
        self.norms_last = config.qk_norm_last
        self.clip = config.attention_clip
        gates = {None: 0, "head": config.num_heads, "all": heads}[config.attention_gate]
        self.weight_of = _GATES[config.attention_gate_activation]
        # as that of queries, beside it in files
        has_bias = config.attention_bias and config.attention_gate == "all"
        sizes = (embed, gates)
        self.gate = optional(gates, Linear, make, sizes, ("embed", "heads"), bias=has_bias)

    @property
    def linear_layers(self) -> list[Linear]:
        """The linear layers."""
        layers = [self.query, self.key, self.value, self.out, self.gate]
        return [layer for layer in layers if layer is not None]

    def project(
        self,
        x: Float[Array, "T E"],
        rotation: Rotation | None,
        adapters: LayerAdapters | None = None,
    ) -> Projections:
        """The inputs of every token."""
        tokens = x.shape[0]
        if self.in_norm is not None:
            x = self.in_norm(x)
        # On a TPU, XLA would fuse the reshapes into the products, and transpose the weights for that in every layer.
        results = project(x, [self.query, *filter(None, [self.key, self.value, self.gate])])
        gate = None
        if self.gate is not None:
            gate = self.weight_of(results.pop()).reshape(tokens, self.num_heads, -1)
        projected = [unfused(values) for values in results]
        projected = with_adapters(adapters, "attention", x, projected)
        of_queries = rotation and rotation.of_queries
        query = self._positioned(projected[0], self.query_norm, of_queries)
        sinks = None
        if self.sinks is not None:
            sinks = self.sinks[...]
        if self.key is None:
            return query, None, None, gate, sinks
        key = self._positioned(projected[1], self.key_norm, rotation)
        value = projected[-1]
        value = self._clipped(value.reshape(tokens, -1, self.head_dim))
        return query, key, _normed(self.value_norm, value), gate, sinks

    def _positioned(
        self, x: Float[Array, "T X"], norm: Norm | None, rotate: Callable[[Array], Array] | None
    ) -> Float[Array, "T H D"]:
        """Queries or keys of each head, with their norm and rotary positions."""
        if not self.norms_last:
            x = _normed(norm, x)
        heads = self._clipped(x.reshape(x.shape[0], -1, self.head_dim))
        if rotate is not None:
            heads = rotate(heads)
        if self.norms_last:
            heads = _normed(norm, heads)
        return heads

    def _clipped(self, heads: Float[Array, "T H D"]) -> Float[Array, "T H D"]:
        """Numbers at most as far from zero as the model allows."""
        if self.clip is None:
            return heads
        return jnp.clip(heads, -self.clip, self.clip)

    def mix[Cache](
        self, inputs: Projections, layer: Index, mixing: Mixing[Cache], cache: Cache
    ) -> tuple[Float[Array, "T H D"], Cache]:
        """Attend over the pages of the layer, after writing the new keys and values to them."""
        query, key, value, gate, sinks = inputs
        out, cache = mixing.attend(layer, query, key, value, cache, sinks)
        if gate is not None:
            out = out * gate
        return out, cache

    def merge(
        self,
        out: Float[Array, "T H D"],
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
    ) -> Float[Array, "B E"]:
        """Project the heads of every token back, or of those in `keep`. `adapters` are those of the same tokens."""
        merged = kept(out.reshape(out.shape[0], -1), keep)
        return with_adapters(adapters, "attention_out", merged, [self.out(merged)])[0]


def _normed(norm: Norm | None, x: Float[Array, "T *any"]) -> Float[Array, "T *any"]:
    """The vectors after a norm of each head or of all heads together, if there is one."""
    if norm is None:
        return x
    return norm.of_groups(x)


def _head_norm(make: Maker, config: ModelConfig, num_heads: int, axis: str) -> Norm | None:
    """The norm of queries or of keys."""
    match config.qk_norm:
        case None:
            return None
        case "head":
            return Norm(make, config, config.head_dim, "head_dim")
        case "all":
            return Norm(make, config, num_heads * config.head_dim, axis)


def _input_width(config: ModelConfig) -> int:
    """The width of the inputs of attention: with the residual "carried" the stream and the embedding side by side."""
    if config.residual == "carried":
        return 2 * config.embed_dim
    return config.embed_dim


def _kv_projection(make: Maker, config: ModelConfig) -> Linear:
    """The projection to keys or to values. All copies of a head have the values that the head has without copies."""
    columns = copied_columns(
        range(config.num_kv_heads * config.head_dim), config.kv_copies, config.head_dim
    )
    sizes = _input_width(config), len(columns) // config.kv_copies
    projection = Linear(make, sizes, ("embed", "kv_heads"), bias=config.attention_bias)
    if config.kv_copies > 1:
        projection.take_outputs(columns)
    return projection
