"""Parameters are sharded by the table, created on their devices, and equal on every mesh."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orca_jax.model.checkpoint import save_decoder
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import abstract_decoder, load_decoder, random_decoder
from orca_jax.model.parameters import flat_parameters, num_copies
from orca_jax.model.sharding import MESH_AXES, keep_order, most_shards, on_shards, padded_vocab
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import ModelConfig
from orca_jax.values.errors import ConfigError
from tests.assembly.divisible import check_divisible
from tests.covering import slow
from tests.model.reference import REFERENCE, mesh_of

GPT2 = read_model_config("preset:gpt2")


def small(name: str) -> ModelConfig:
    return read_model_config(REFERENCE / name)


@pytest.mark.parametrize(
    "name", ["gpt2-12-heads", "gpt2-untied-sharded", "llama-12-heads-3-groups"]
)
def test_every_parameter_has_axes_from_the_table(name: str) -> None:
    _, shapes = abstract_decoder(small(name), "float32", mesh_of(4))
    for path, variable in nnx.to_flat_state(shapes):
        axes, leaf = variable.get_metadata("axes"), variable.get_value()
        assert len(axes) == len(leaf.shape), path
        assert leaf.sharding.spec == jax.sharding.PartitionSpec(
            *(MESH_AXES[axis] for axis in axes)
        ), path


def test_the_largest_model_can_be_planned_without_memory() -> None:
    _, shapes = abstract_decoder(read_model_config("preset:gpt3-341b"), "bfloat16", mesh_of(8))
    leaves = jax.tree.leaves(shapes)
    assert 340e9 < sum(leaf.size for leaf in leaves) < 343e9
    shards = sum(np.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)
    assert shards < 1.01 * sum(leaf.size for leaf in leaves) / 8


def test_tables_and_experts_keep_the_usual_order_of_axes() -> None:
    """In shapes and in arrays, so that a program compiled for the shapes takes the arrays as they are."""
    mesh, names = mesh_of(2), []
    shapes = nnx.merge(*abstract_decoder(small("mixtral"), "float32", mesh))
    arrays = load_decoder(REFERENCE / "mixtral", dtype="float32", mesh=mesh)
    before = {path: np.asarray(each) for path, each in flat_parameters(nnx.state(arrays)).items()}
    keep_order(arrays)
    assert all(
        np.array_equal(before[path], each)
        for path, each in flat_parameters(nnx.state(arrays)).items()
    )
    shapes.unstack()
    keep_order(shapes)
    for path, shape in flat_parameters(nnx.state(shapes)).items():
        if shape.format.layout is not None:
            names.append(path.replace("blocks.0", "blocks"))
            assert shape.format.layout.major_to_minor == tuple(range(len(shape.shape)))
    tables, experts = (
        ["embedding.table", "head.table"],
        [f"blocks.mlp.{name}" for name in ("gate", "up", "down")],
    )
    assert {*tables, *experts} <= {*names} and len(names) == 2 + 3 * small("mixtral").num_layers


def same_values(one: Decoder, other: Decoder) -> bool:
    """True if a decoder without copies of key/value heads has the values of another one, apart from padding."""
    pairs = zip(
        flat_parameters(nnx.state(one)).items(),
        flat_parameters(nnx.state(other)).values(),
        strict=True,
    )
    same = []
    for (path, alone), held in pairs:
        rows = min(len(alone), len(held))
        values = np.asarray(held)[:rows]
        if num_copies(path, other.config) > 1:
            by_head = values.reshape(
                *values.shape[:-1], -1, other.config.kv_copies, other.config.head_dim
            )
            assert (by_head == by_head[..., :1, :]).all(), (
                "copies are equal, and next to each other"
            )
            values = by_head[..., 0, :].reshape(np.asarray(alone).shape)
        same.append(np.array_equal(np.asarray(alone)[:rows], values))
    return all(same)


@pytest.mark.usefixtures("quick_compiles")
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        slow("llama-12-heads-3-groups", 4),
        ("llama-biases-sharded", 6),
    ],
)
def test_random_values_do_not_depend_on_the_mesh(name: str, devices: int) -> None:
    """Also if each of two key/value heads is held three times."""
    config = small(name)
    one, many = (
        random_decoder(config, dtype="float32", mesh=mesh_of(size), seed=3) for size in (1, devices)
    )
    assert same_values(one, many)
    assert len(many.blocks.mlp.up.kernel.get_value().sharding.device_set) == devices
    assert many.config.num_kv_heads == max(config.num_kv_heads, devices)
    assert not same_values(one, random_decoder(config, dtype="float32", mesh=mesh_of(1), seed=4))


@pytest.mark.parametrize(
    ("name", "most"), [("llama-biases-sharded", 6), ("olmo2", 4), ("phi3-window", 4)]
)
def test_checkpoints_hold_one_copy_of_each_head(tmp_path: Path, name: str, most: int) -> None:
    """Safetensors and Orbax are read into copies, and copies are saved once."""
    source = REFERENCE / name
    one, many = (load_decoder(source, dtype="float32", mesh=mesh_of(size)) for size in (1, most))
    assert many.config.kv_copies == most // 2 and same_values(one, many)
    shutil.copy(source / "config.json", tmp_path)
    save_decoder(many, tmp_path, "float32")
    for size in (1, 2, most):
        assert same_values(one, load_decoder(tmp_path, dtype="float32", mesh=mesh_of(size)))


def test_random_weights_are_gpt2s() -> None:
    config = small("gpt2-12-heads")
    decoder = load_decoder(
        REFERENCE / "gpt2-12-heads", dtype="bfloat16", mesh=mesh_of(2), load_format="dummy"
    )
    kernel = np.asarray(decoder.blocks.mlp.up.kernel.get_value()).astype(np.float32)
    assert (
        kernel.dtype == np.float32
        and decoder.blocks.mlp.up.kernel.get_value().dtype == jnp.bfloat16
    )
    assert 0.018 < kernel.std() < 0.022
    assert not np.array_equal(kernel[0], kernel[1]), "layers must differ"
    table = np.asarray(decoder.embedding.table.get_value()).astype(np.float32)
    assert table.shape[0] == 256 and (table[: config.vocab_size].std(axis=1) > 0).all()
    assert (table[config.vocab_size :] == 0).all()


@pytest.mark.parametrize(
    ("shards", "rows"), [(1, 50304), (2, 50432), (8, 51200), (3, 50304), (5, 50560), (25, 51200)]
)
def test_vocabulary_is_padded_to_128_on_each_device(shards: int, rows: int) -> None:
    assert padded_vocab(GPT2, shards) == rows
    assert padded_vocab(dataclasses.replace(GPT2, vocab_size=rows), shards) == rows


def test_uneven_meshes_are_refused_with_those_that_fit() -> None:
    check_divisible(GPT2, 4)
    with pytest.raises(
        ConfigError, match=r"8 does not divide 12 query heads.*\[1, 2, 3, 4, 6, 12\]"
    ) as caught:
        check_divisible(GPT2, 8)
    assert caught.value.param == "tensor_parallel_size"
    with pytest.raises(ConfigError, match="25 query heads"):
        check_divisible(read_model_config(REFERENCE / "gpt2-25-heads"), 2)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fitting"),
    [
        (8, 8, [1, 2, 4, 8]),
        (8, 2, [1, 2, 4, 8]),
        (6, 2, [1, 2, 6]),
        (12, 4, [1, 2, 4, 12]),
        (12, 1, [1, 2, 3, 4, 6, 12]),
    ],
)
def test_devices_divide_key_value_heads_or_are_a_multiple_of_them(
    heads: int, kv_heads: int, fitting: list[int]
) -> None:
    config = dataclasses.replace(GPT2, num_heads=heads, num_kv_heads=kv_heads, mlp_dim=48)
    for shards in range(1, 13):
        if shards in fitting:
            check_divisible(config, shards)
            held = on_shards(config, shards)
            assert held.num_kv_heads == kv_heads * held.kv_copies == max(kv_heads, shards)
            assert on_shards(held, shards) == held
        else:
            with pytest.raises(ConfigError, match=r"does not divide|neither divides") as caught:
                check_divisible(config, shards)
            assert str(caught.value).endswith(f"use one of {fitting}")
        assert most_shards(config, shards) == max(n for n in fitting if n <= shards)


def test_a_number_that_fits_no_key_value_heads_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"3 neither divides 2 key/value heads nor is a multiple.*\[1, 2, 6\]"
    ):
        check_divisible(small("llama-biases-sharded"), 3)
