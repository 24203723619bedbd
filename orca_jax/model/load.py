"""From a name to a decoder whose parameters lie where they belong on the mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh

from orca_jax.config import DType, ModelConfig
from orca_jax.model.sharding import TENSOR_AXIS, check_divisible, padded_vocab, param_shardings, tensor_parallel_size
from orca_jax.model.transformer import Decoder


def tensor_mesh(devices: list[Any]) -> Mesh:
    """A mesh of `devices` along the tensor axis, on which XLA propagates shardings by itself."""
    return Mesh(np.array(devices), (TENSOR_AXIS,), axis_types=(AxisType.Auto,))


def decoder_builder(config: ModelConfig, dtype: DType, shards: int, seed: int = 0) -> Callable[[], Decoder]:
    """A function that creates the decoder with random values, for tracing."""
    rows = padded_vocab(config, shards)
    return lambda: Decoder(config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(seed), vocab_rows=rows)


def abstract_decoder(config: ModelConfig, dtype: DType, mesh: Mesh) -> tuple[nnx.GraphDef[Decoder], nnx.State]:
    """The decoder's structure, and a tree of shapes with shardings in place of its parameters.

    Raises:
        ConfigError: the mesh does not divide the model.
    """
    shards = tensor_parallel_size(mesh)
    check_divisible(config, shards)
    structure, state = nnx.split(nnx.eval_shape(decoder_builder(config, dtype, shards)))
    shapes: nnx.State = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        param_shardings(state, mesh),
    )
    return structure, shapes


def random_decoder(config: ModelConfig, *, dtype: DType, mesh: Mesh, seed: int = 0) -> Decoder:
    """A decoder with random weights, created shard by shard. The same values on every mesh, up to vocabulary padding.

    Raises:
        ConfigError: the mesh does not divide the model.
    """
    _, shapes = abstract_decoder(config, dtype, mesh)
    build = decoder_builder(config, dtype, tensor_parallel_size(mesh), seed)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    create = jax.jit(lambda: nnx.state(build()), out_shardings=shardings)
    structure, _ = nnx.split(nnx.eval_shape(build))
    decoder: Decoder = nnx.merge(structure, create())
    return decoder
