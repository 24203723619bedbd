"""Mixtures of experts: the choice of experts, their weights in files and on devices, and their memory."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from orca_jax.model.checkpoint import save_decoder
from orca_jax.model.describe import config_from_hf, read_model_config
from orca_jax.model.experts import Experts
from orca_jax.model.load import load_decoder, prepare_load, random_decoder
from orca_jax.model.maker import Maker
from orca_jax.model.parameters import flat_parameters
from orca_jax.model.stages import LayerSpan
from orca_jax.model.transformer import Decoder
from orca_jax.model.weight_files import SINGLE
from orca_jax.values.errors import CheckpointError, ConfigError
from orca_jax.values.layer_config import ExpertsConfig
from tests.assembly.divisible import check_divisible
from tests.model.reference import REFERENCE, copy_of, mesh_of
from tests.model.states.hybrids import write

MIXTRAL, QWEN3, QWEN2 = "mixtral", "qwen3_moe", "qwen2_moe"
CONFIG = read_model_config(REFERENCE / QWEN3)


def load(directory: Path, devices: int = 1) -> Decoder:
    return load_decoder(directory, dtype="float32", mesh=mesh_of(devices))


def values(decoder: Decoder) -> dict[str, np.ndarray]:
    return {path: np.asarray(value) for path, value in flat_parameters(nnx.state(decoder)).items()}


def experts(config: ExpertsConfig) -> Experts:
    return Experts(Maker(jnp.dtype("float32"), nnx.Rngs(2)), CONFIG, config, 0.02)


@pytest.mark.parametrize("is_normalised", [False, True])
def test_the_most_probable_experts_are_chosen(is_normalised: bool) -> None:
    x = jnp.asarray(np.random.default_rng(1).normal(size=(9, CONFIG.embed_dim)) * 30, jnp.float32)
    block = experts(ExpertsConfig(8, 3, is_normalised))
    scores = np.asarray(x, np.float64) @ np.asarray(block.router[...], np.float64)
    probabilities = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    wanted = -np.sort(-probabilities, axis=1)[:, :3]
    if is_normalised:
        wanted /= wanted.sum(axis=1, keepdims=True)
    chosen, weights = block.route(x)
    np.testing.assert_array_equal(chosen, np.argsort(-probabilities, axis=1)[:, :3])
    np.testing.assert_allclose(weights, wanted, rtol=1e-5)
    again, _ = block.route(x[4:5])
    np.testing.assert_array_equal(again[0], chosen[4])


def test_the_tensor_of_each_expert_is_found() -> None:
    tensors = load_file(REFERENCE / QWEN3 / SINGLE)
    loaded = values(load(REFERENCE / QWEN3, devices=2))
    assert loaded["blocks.mlp.gate"].shape == (2, 8, 32, 12) and loaded[
        "blocks.mlp.down"
    ].shape == (2, 8, 12, 32)
    for layer, expert in ((0, 0), (1, 7)):
        key = f"model.layers.{layer}.mlp.experts.{expert}"
        for ours, theirs in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
            np.testing.assert_array_equal(
                loaded[f"blocks.mlp.{ours}"][layer, expert], tensors[f"{key}.{theirs}.weight"].T
            )


def test_a_stage_has_the_experts_of_its_layers() -> None:
    whole = values(load(REFERENCE / MIXTRAL))
    loading = prepare_load(REFERENCE / MIXTRAL, dtype="float32")
    last = values(loading.load(mesh_of(1), span=LayerSpan(1, 2, 2)))
    assert last["blocks.mlp.up"].shape[0] == 1
    for name in ("router", "gate", "up", "down"):
        np.testing.assert_array_equal(last[f"blocks.mlp.{name}"][0], whole[f"blocks.mlp.{name}"][1])


def test_orbax_holds_experts(tmp_path: Path) -> None:
    shutil.copy(REFERENCE / QWEN2 / "config.json", tmp_path)
    original = load(REFERENCE / QWEN2, devices=2)
    save_decoder(original, tmp_path, "float32")
    expected = values(original)
    found = values(load(tmp_path))
    assert found.keys() == expected.keys()
    for path, value in found.items():
        rows = min(len(value), len(expected[path]))  # of the vocabulary, less padding
        np.testing.assert_array_equal(value[:rows], expected[path][:rows], err_msg=path)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiles")
def test_random_experts_do_not_depend_on_the_mesh() -> None:
    one, two = (
        values(random_decoder(CONFIG, dtype="float32", mesh=mesh_of(size), seed=3))
        for size in (1, 2)
    )
    for name in ("router", "gate", "up", "down"):
        np.testing.assert_array_equal(one[f"blocks.mlp.{name}"], two[f"blocks.mlp.{name}"])
    gate = one["blocks.mlp.gate"]
    assert not np.array_equal(gate[0, 0], gate[0, 1]) and not np.array_equal(gate[0, 0], gate[1, 0])


def problems(directory: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    return caught.value.problems


def test_wrong_tensors_of_experts_are_named(tmp_path: Path) -> None:
    directory = copy_of(MIXTRAL, tmp_path)
    tensors = load_file(directory / SINGLE)
    key = "model.layers.1.block_sparse_moe.experts"
    del tensors[f"{key}.3.w2.weight"]
    tensors[f"{key}.0.w1.weight"] = tensors[f"{key}.0.w1.weight"][:5].copy()
    tensors[f"{key}.5.w1.weight"] = tensors[f"{key}.1.w1.weight"].copy()
    save_file(tensors, directory / SINGLE)
    assert set(problems(directory)) == {
        f"{key}.3.w2.weight: missing",
        f"{key}.0.w1.weight: shape [5, 32], the model needs [24, 32]",
        f"{key}.5.w1.weight: unexpected",
    }


def test_more_experts_than_tensors_are_one_problem(tmp_path: Path) -> None:
    directory = copy_of(MIXTRAL, tmp_path)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_local_experts": 10**9}))
    number = len(load_file(directory / SINGLE))
    assert problems(directory) == (
        f"config.json: 2 layers of 1000000000 experts, but the files contain {number} tensors",
    )


def test_devices_divide_the_width_of_experts() -> None:
    config = read_model_config(REFERENCE / QWEN2)  # experts of 12, and a shared one of 20
    check_divisible(config, 4)
    with pytest.raises(ConfigError, match=r"does not divide 14 mlp width; use one of \[1, 2\]"):
        check_divisible(dataclasses.replace(config, mlp_dim=14), 4)
    assert config.experts is not None
    shared = dataclasses.replace(config, experts=dataclasses.replace(config.experts, shared_dim=18))
    with pytest.raises(
        ConfigError, match=r"does not divide 18 width of the shared expert; use one of \[1, 2\]"
    ):
        check_divisible(shared, 4)


@pytest.mark.parametrize(
    "key", ["router_jitter_noise", "output_router_logits", "router_aux_loss_coef"]
)
def test_keys_of_training_have_no_effect(key: str) -> None:
    for family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"):
        assert config_from_hf({"model_type": family, key: 0.5}) == config_from_hf(
            {"model_type": family}
        )


def test_both_names_of_the_number_of_experts() -> None:
    for family in ("mixtral", "qwen3_moe", "olmoe"):
        sizes = [
            config_from_hf({"model_type": family, key: 16}).experts
            for key in ("num_experts", "num_local_experts")
        ]
        assert sizes[0] == sizes[1] and sizes[0] is not None and sizes[0].count == 16
        with pytest.raises(ConfigError, match="contradicts"):
            config_from_hf({"model_type": family, "num_experts": 4, "num_local_experts": 8})


def test_defaults_are_those_of_transformers() -> None:
    found = {
        family: config_from_hf({"model_type": family})
        for family in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
    }
    shapes = {
        family: (
            c.num_layers,
            c.embed_dim,
            c.num_heads,
            c.num_kv_heads,
            c.head_dim,
            c.mlp_dim,
            c.experts,
        )
        for family, c in found.items()
    }
    assert shapes == {
        "mixtral": (32, 4096, 32, 8, 128, 14336, ExpertsConfig(8, 2)),
        "qwen2_moe": (
            24,
            2048,
            16,
            16,
            128,
            1408,
            ExpertsConfig(60, 4, is_normalised=False, shared_dim=5632),
        ),
        "qwen3_moe": (24, 2048, 32, 4, 64, 768, ExpertsConfig(128, 8, is_normalised=False)),
        "olmoe": (16, 2048, 16, 16, 128, 2048, ExpertsConfig(64, 8, is_normalised=False)),
    }
    thetas = {family: c.rope.theta for family, c in found.items() if c.rope is not None}
    assert thetas == {"mixtral": 1e6, "qwen2_moe": 1e4, "qwen3_moe": 1e4, "olmoe": 1e4}


def test_only_the_experts_of_a_token_are_active() -> None:
    assert CONFIG.mlp_dim == 12 and CONFIG.active_mlp_dim == 3 * 12
    shared = read_model_config(REFERENCE / QWEN2)
    assert shared.active_mlp_dim == 2 * 12 + 20
    dense = read_model_config(REFERENCE / "qwen3")
    assert dense.active_mlp_dim == dense.mlp_dim
    assert len(jax.tree.leaves(nnx.state(experts(ExpertsConfig(8, 3))))) == 4


def test_experts_in_joined_tensors(tmp_path: Path) -> None:
    """Files with one tensor for the gates and ups of all experts of a layer, and one for the downs."""
    write("qwen3_5_moe_text-1", tmp_path)
    expected = values(load(tmp_path))
    tensors = load_file(tmp_path / SINGLE)
    for prefix in {key.partition(".experts.")[0] for key in tensors if ".experts." in key}:
        parts = {
            name: [
                tensors.pop(f"{prefix}.experts.{expert}.{name}_proj.weight") for expert in range(4)
            ]
            for name in ("gate", "up", "down")
        }
        both = [np.concatenate(pair) for pair in zip(parts["gate"], parts["up"], strict=True)]
        tensors |= {
            f"{prefix}.experts.gate_up_proj": np.stack(both),
            f"{prefix}.experts.down_proj": np.stack(parts["down"]),
        }
    save_file(tensors, tmp_path / SINGLE)
    found = values(load(tmp_path))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, path)
    key = next(key for key in tensors if key.endswith("gate_up_proj"))
    save_file(tensors | {key: tensors[key][:, 1:]}, tmp_path / SINGLE)
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj\[0\]: shape \[23, 24\], the model needs \[24, 24\]"
    ):
        load(tmp_path)
    save_file(tensors | {key: tensors[key][1:]}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match=r"gate_up_proj\[3\]: missing"):
        load(tmp_path)
