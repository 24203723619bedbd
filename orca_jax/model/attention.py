"""The attention of a block, around a kernel passed as an argument.

The model does not depend on the form of the KV cache: `attend` takes the new keys and values of this iteration's
tokens, updates its cache, and returns the output. This is the paper's selective batching: everything here runs on the
merged tokens of all requests, and only `attend` separates requests (section 3.2).
"""

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array, Float, Int

from orca_jax.config import ModelConfig
from orca_jax.model.layers import Linear, Maker, Norm, unfused
from orca_jax.model.lora.launch import LayerAdapters
from orca_jax.model.parameters import copied_columns
from orca_jax.model.rope import Rotation

type Attend[Cache] = Callable[
    [int | Int[Array, ""], Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"], Cache],
    tuple[Float[Array, "T H D"], Cache],
]
"""`attend(layer, q, k, v, cache) -> (out, cache)`. It scales and caps scores itself, and applies the sliding window of
the layer. `layer` is an integer if layers are unrolled, and else a traced scalar."""

type LayerAttend[Cache] = Callable[
    [Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"], Cache], tuple[Float[Array, "T H D"], Cache]
]
"""`Attend` with the layer filled in."""

type Projections = tuple[Float[Array, "T H D"], Float[Array, "T K D"], Float[Array, "T K D"]]
"""Queries, keys and values."""


class Attention(nnx.Module):
    """Projections to queries, keys and values, their norms and rotary positions if the model has them, and back."""

    def __init__(self, make: Maker, config: ModelConfig, out_std: float) -> None:
        self.head_dim = config.head_dim
        embed, heads = config.embed_dim, config.num_heads * config.head_dim
        self.query = Linear(make, (embed, heads), ("embed", "heads"), bias=config.attention_bias)
        self.key, self.value = _kv_projection(make, config), _kv_projection(make, config)
        self.query_norm = nnx.data(_head_norm(make, config, config.num_heads, "heads"))
        self.key_norm = nnx.data(_head_norm(make, config, config.num_kv_heads, "kv_heads"))
        self.out = Linear(make, (heads, embed), ("heads", "embed"), bias=config.attention_out_bias, std=out_std)

    def __call__[Cache](
        self,
        x: Float[Array, "T E"],
        rotation: Rotation | None,
        attend: LayerAttend[Cache],
        cache: Cache,
        keep: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B E"], Cache]:
        """Attention output of every token, or of those in `keep`, and the cache with the new keys and values."""
        out, cache = attend(*self.project(x, rotation), cache)
        return self.merge(out, keep), cache

    def project(
        self, x: Float[Array, "T E"], rotation: Rotation | None, adapters: LayerAdapters | None = None
    ) -> Projections:
        """Queries, keys and values of every token."""
        tokens = x.shape[0]
        # On a TPU, XLA would fuse the reshapes into the products, and transpose the weights for that in every layer.
        projected = [unfused(project(x)) for project in (self.query, self.key, self.value)]
        query, key, value = projected if adapters is None else adapters.added("attention", x, projected)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm.of_groups(query), self.key_norm.of_groups(key)
        query, key, value = (values.reshape(tokens, -1, self.head_dim) for values in (query, key, value))
        if rotation is not None:
            query, key = rotation(query), rotation(key)
        return query, key, value

    def merge(
        self,
        out: Float[Array, "T H D"],
        keep: Int[Array, "B"] | None = None,
        adapters: LayerAdapters | None = None,
    ) -> Float[Array, "B E"]:
        """Project the heads of every token back, or of those in `keep`. `adapters` are those of the same tokens."""
        merged = out.reshape(out.shape[0], -1)
        merged = merged if keep is None else merged[keep]
        projected = self.out(merged)
        return projected if adapters is None else adapters.added("attention_out", merged, [projected])[0]


def _head_norm(make: Maker, config: ModelConfig, num_heads: int, axis: str) -> Norm | None:
    """The norm of queries or of keys."""
    match config.qk_norm:
        case None:
            return None
        case "head":
            return Norm(make, config, config.head_dim, "head_dim")
        case "all":
            return Norm(make, config, num_heads * config.head_dim, axis)


def _kv_projection(make: Maker, config: ModelConfig) -> Linear:
    """The projection to keys or to values. All copies of a head have the values that the head has without copies."""
    columns = copied_columns(range(config.num_kv_heads * config.head_dim), config.kv_copies, config.head_dim)
    sizes = config.embed_dim, len(columns) // config.kv_copies
    projection = Linear(make, sizes, ("embed", "kv_heads"), bias=config.attention_bias)
    if config.kv_copies > 1:
        projection.take_outputs(columns)
    return projection
