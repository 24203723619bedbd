"""Sharding of parameters: one table maps logical axes to mesh axes. The layers do not depend on the mesh."""

import math
from collections.abc import Mapping

import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from orca_jax.config import ModelConfig
from orca_jax.errors import ConfigError

TENSOR_AXIS = "tensor"

MESH_AXES: Mapping[str, str | None] = {
    "layers": None,
    "positions": None,
    "embed": None,
    "heads": TENSOR_AXIS,  # query heads times head dim
    "kv_heads": TENSOR_AXIS,  # key/value heads times head dim
    "mlp": TENSOR_AXIS,
    "vocab": TENSOR_AXIS,
}


def partition_spec(axes: tuple[str, ...]) -> PartitionSpec:
    """The mesh axes of an array with the logical `axes`."""
    return PartitionSpec(*(MESH_AXES[axis] for axis in axes))


def param_shardings(state: nnx.State, mesh: Mesh | AbstractMesh) -> nnx.State:
    """A tree like `state`, with a `NamedSharding` in place of each parameter's value.

    Every parameter has its logical axes in its metadata `axes`, written by `layers.Maker`.
    """

    def place(variable: nnx.Variable[object]) -> nnx.Variable[object]:
        return variable.replace(NamedSharding(mesh, partition_spec(variable.get_metadata("axes"))))

    placed: nnx.State = nnx.map_state(lambda _, variable: place(variable), state)
    return placed


def tensor_parallel_size(mesh: Mesh | AbstractMesh) -> int:
    """Number of devices that share one copy of the weights."""
    return int(mesh.shape[TENSOR_AXIS])


def padded_vocab(config: ModelConfig, shards: int) -> int:
    """Rows of the embedding table: the vocabulary, rounded up to a multiple of 128 and of the number of shards."""
    multiple = math.lcm(config.padded_vocab_multiple, shards)
    return math.ceil(config.vocab_size / multiple) * multiple


def most_shards(config: ModelConfig, most: int) -> int:
    """The largest number of devices, up to `most`, that divides heads and MLP evenly."""
    sizes = (config.num_heads, config.num_kv_heads, config.mlp_dim)
    return max(n for n in range(1, most + 1) if all(size % n == 0 for size in sizes))


def check_divisible(config: ModelConfig, shards: int) -> None:
    """Check that `shards` devices can share the model.

    Raises:
        ConfigError: heads, key/value heads or the MLP do not divide evenly. The error names them and valid numbers.
    """
    sizes = {"query heads": config.num_heads, "key/value heads": config.num_kv_heads, "mlp width": config.mlp_dim}
    uneven = [f"{size} {name}" for name, size in sizes.items() if size % shards]
    if uneven:
        common = int(np.gcd.reduce(list(sizes.values())))
        fitting = [n for n in range(1, common + 1) if common % n == 0]
        raise ConfigError(
            f"tensor_parallel_size {shards} does not divide {', '.join(uneven)}; use one of {fitting}",
            param="tensor_parallel_size",
        )
