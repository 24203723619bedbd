"""Sharding of parameters: one table maps logical axes to mesh axes. The layers do not depend on the mesh."""

import math
from collections.abc import Mapping
from dataclasses import replace

import jax
from flax import nnx
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orca_jax.values.config import ModelConfig

TENSOR_AXIS = "tensor"

# each shard has whole blocks of the vocabulary: matrix products are aligned, sums are by blocks
VOCAB_BLOCK = 128

MESH_AXES: Mapping[str, str | None] = {
    "layers": None,
    "positions": None,
    "ids": None,  # of tokens, in tables that each device has a whole copy of
    "embed": None,
    "heads": TENSOR_AXIS,  # query heads times head dim
    "kv_heads": TENSOR_AXIS,  # key/value heads times head dim
    "head_dim": None,
    # numbers of a latent, and of its rotated key: each device has those of all tokens
    "latent": None,
    "channels": TENSOR_AXIS,  # of convolutions
    "taps": None,  # tokens that a convolution sees
    "mlp": TENSOR_AXIS,  # width of the MLP or of each expert
    "experts": None,
    "vocab": TENSOR_AXIS,
    # of inputs with one scale, in quantised matrices; of layers with the same input, in adapters
    "groups": None,
    "slots": None,  # of adapters
    "rank": None,  # of adapters
    "columns": None,  # in a block of a packed matrix
}


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The mesh axes of an array with the logical `axes`; None for an axis that is never split."""
    return PartitionSpec(*(None if axis is None else MESH_AXES[axis] for axis in axes))


def keep_order(module: nnx.Module) -> None:
    """Keep tables and the experts of separate layers, or their shapes, in the usual order of axes in memory.

    The order that XLA prefers on a TPU depends on sizes. For widths that are not multiples of 128 it is another order,
    and each step would copy the arrays.
    """
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param) and variable.get_metadata("axes", ())[:1] in (
            ("vocab",),
            ("experts",),
        ):
            value = variable.get_value()
            place = Format(Layout(tuple(range(len(value.shape)))), value.sharding)
            if isinstance(value, jax.Array):
                variable.set_value(jax.device_put(value, place))
            else:
                variable.set_value(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place))


HEADS_SPEC = partition_spec((None, "heads", None))
"""The partition of queries, keys and values over a mesh, and of the results of attention."""


def param_shardings(state: nnx.State, mesh: Mesh | AbstractMesh) -> nnx.State:
    """A tree like `state`, with a `NamedSharding` in place of each parameter's value.

    Every parameter has its logical axes in its metadata `axes`, written by `layers.Maker`. Those of other modules have
    none, in decoders from outside this package, and each device has a copy.
    """

    def place(variable: nnx.Variable[object]) -> nnx.Variable[object]:
        return variable.replace(
            NamedSharding(mesh, partition_spec(variable.get_metadata("axes", ())))
        )

    placed: nnx.State = nnx.map_state(lambda _, variable: place(variable), state)
    return placed


def tensor_parallel_size(mesh: Mesh | AbstractMesh) -> int:
    """Number of devices that share one copy of the weights."""
    return int(mesh.shape[TENSOR_AXIS])


def padded_vocab(config: ModelConfig, shards: int) -> int:
    """Rows of the embedding table: the vocabulary, rounded up to whole blocks on each shard."""
    multiple = VOCAB_BLOCK * shards
    return math.ceil(config.vocab_size / multiple) * multiple


def on_shards(config: ModelConfig, shards: int) -> ModelConfig:
    """The configuration as `shards` devices hold it: with at least one key/value head on each device.

    If there are more devices than heads, each head is held several times. The copies are next to each other, so each
    query head finds its key/value head on its own device.
    """
    copies = max(1, shards // config.num_kv_heads)
    wide = config.wide
    if wide is not None:
        more = max(1, shards // wide.num_kv_heads)
        wide = wide._replace(num_kv_heads=wide.num_kv_heads * more, kv_copies=wide.kv_copies * more)
    heads = config.num_kv_heads * copies
    return replace(config, wide=wide, num_kv_heads=heads, kv_copies=config.kv_copies * copies)


def can_share(config: ModelConfig, shards: int) -> bool:
    """True if `shards` devices can share the model."""
    return not uneven_parts(config, shards)


def most_shards(config: ModelConfig, most: int) -> int:
    """The largest number of devices, up to `most`, that can share the model."""
    return max(n for n in range(1, most + 1) if can_share(config, n))


def uneven_parts(config: ModelConfig, shards: int) -> list[str]:
    """The reasons for which `shards` devices cannot share the model."""
    sizes = {"query heads": config.num_heads, "mlp width": config.mlp_dim}
    if config.wide is not None and config.wide.num_heads is not None:
        sizes["query heads of some layers"] = config.wide.num_heads
    if config.experts is not None:  # a width of 0 is that of nothing
        sizes["width of the shared expert"] = config.experts.shared_dim
        sizes["width of the MLP beside experts"] = config.experts.beside_dim
    sizes["width of the other MLPs"] = config.dense_mlp_dim
    if config.short_conv is not None:
        sizes["channels of convolutions"] = config.embed_dim
    if config.delta_rule is not None:
        sizes["key heads of the delta rule"] = config.delta_rule.num_key_heads
    if config.mamba is not None:
        sizes["heads of Mamba"] = config.mamba.num_heads
    undivided = [f"{size} {name}" for name, size in sizes.items() if size % shards]
    reasons = [f"does not divide {', '.join(undivided)}"] if undivided else []
    for heads in dict.fromkeys(
        (config.num_kv_heads, config.wide.num_kv_heads if config.wide else config.num_kv_heads)
    ):
        if shards % heads and heads % shards:
            reasons.append(f"neither divides {heads} key/value heads nor is a multiple of them")
    if config.decoder is not None and shards > config.num_kv_heads:
        reasons.append(
            f"is more than {config.num_kv_heads} key/value heads, which your decoder cannot copy"
        )
    return reasons
