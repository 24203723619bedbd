"""Parameters are sharded by the table, created on their devices, and equal on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orca_jax.config import ModelConfig
from orca_jax.errors import ConfigError
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import abstract_decoder, load_decoder, random_decoder
from orca_jax.model.parameters import flat_parameters
from orca_jax.model.sharding import MESH_AXES, check_divisible, padded_vocab
from tests.model.reference import REFERENCE, mesh_of

GPT2 = read_model_config("preset:gpt2")


def small(name: str) -> ModelConfig:
    return read_model_config(REFERENCE / name)


@pytest.mark.parametrize("name", ["gpt2-12-heads", "gpt2-untied-sharded", "llama-12-heads-3-groups"])
def test_every_parameter_has_axes_from_the_table(name: str) -> None:
    _, shapes = abstract_decoder(small(name), "float32", mesh_of(4))
    for path, variable in nnx.to_flat_state(shapes):
        axes, leaf = variable.get_metadata("axes"), variable.get_value()
        assert len(axes) == len(leaf.shape), path
        assert leaf.sharding.spec == jax.sharding.PartitionSpec(*(MESH_AXES[axis] for axis in axes)), path


def test_the_largest_model_can_be_planned_without_memory() -> None:
    _, shapes = abstract_decoder(read_model_config("preset:gpt3-341b"), "bfloat16", mesh_of(8))
    leaves = jax.tree.leaves(shapes)
    assert 340e9 < sum(leaf.size for leaf in leaves) < 343e9
    shards = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    assert shards < 1.01 * sum(leaf.size for leaf in leaves) / 8


@pytest.mark.usefixtures("quick_compiles")
def test_random_values_do_not_depend_on_the_mesh() -> None:
    config = small("llama-12-heads-3-groups")
    one, four = (random_decoder(config, dtype="float32", mesh=mesh_of(size), seed=3) for size in (1, 4))
    for (path, a), b in zip(
        flat_parameters(nnx.state(one)).items(), flat_parameters(nnx.state(four)).values(), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=path)
    assert len(four.blocks.mlp.up.kernel.get_value().sharding.device_set) == 4
    other = random_decoder(config, dtype="float32", mesh=mesh_of(1), seed=4)
    assert not np.array_equal(
        np.asarray(one.embedding.table.get_value()), np.asarray(other.embedding.table.get_value())
    )


def test_random_weights_are_gpt2s() -> None:
    config = small("gpt2-12-heads")
    decoder = load_decoder(REFERENCE / "gpt2-12-heads", dtype="bfloat16", mesh=mesh_of(2), load_format="dummy")
    kernel = np.asarray(decoder.blocks.mlp.up.kernel.get_value()).astype(np.float32)
    assert kernel.dtype == np.float32 and decoder.blocks.mlp.up.kernel.get_value().dtype == jnp.bfloat16
    assert 0.018 < kernel.std() < 0.022
    assert not np.array_equal(kernel[0], kernel[1]), "layers must differ"
    table = np.asarray(decoder.embedding.table.get_value()).astype(np.float32)
    assert table.shape[0] == 256 and (table[: config.vocab_size].std(axis=1) > 0).all()
    assert (table[config.vocab_size :] == 0).all()


@pytest.mark.parametrize(("shards", "rows"), [(1, 50304), (2, 50304), (8, 50304), (3, 50304), (5, 50560), (25, 51200)])
def test_vocabulary_is_padded_to_128_and_to_the_mesh(shards: int, rows: int) -> None:
    assert padded_vocab(GPT2, shards) == rows
    assert padded_vocab(dataclasses.replace(GPT2, vocab_size=rows), shards) == rows


def test_uneven_meshes_are_refused_with_those_that_fit() -> None:
    check_divisible(GPT2, 4)
    with pytest.raises(ConfigError, match=r"8 does not divide 12 query heads.*\[1, 2, 3, 4, 6, 12\]") as caught:
        check_divisible(GPT2, 8)
    assert caught.value.param == "tensor_parallel_size"
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        load_decoder(REFERENCE / "gpt2-25-heads", dtype="float32", mesh=mesh_of(2))
