"""Tensors that files have elsewhere, or as sums: Zamba2's shared blocks."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from orca_jax.model.describe import config_from_hf, read_model_config
from orca_jax.model.families import FAMILIES
from orca_jax.model.load import load_decoder
from orca_jax.values.errors import CheckpointError, ConfigError
from tests.model.reference import mesh_of
from tests.model.states.hybrids import write

TIED = "zamba2-7"  # two blocks for three layers, with additions to attention too
ADDITION = "model.layers.0.shared_transformer.self_attn.linear_q_adapter_list.2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(TIED, tmp_path)
    return tmp_path


def change(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, devices: int = 1) -> None:
    load_decoder(folder, dtype="float32", mesh=mesh_of(devices))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_layer_has_the_tensor_of_its_block_and_its_own_addition(
    folder: Path, devices: int
) -> None:
    """On each device, whose part of the outputs is read alone."""
    decoder = load_decoder(folder, dtype="float32", mesh=mesh_of(devices))
    decoder.unstack()
    tensors = load_file(folder / "model.safetensors")
    base = tensors["model.layers.0.shared_transformer.self_attn.q_proj.weight"]
    product = tensors[f"{ADDITION}.1.weight"] @ tensors[f"{ADDITION}.0.weight"]
    # layers of ours: three with a block, the last of them before the last one with a state
    mixers = [kind.mixer for kind in decoder.config.layers]
    last = max(layer for layer, mixer in enumerate(mixers) if mixer == "attention")
    found = np.asarray(decoder.blocks[last].attention.query.kernel[...])
    np.testing.assert_allclose(found, (base + product).T, rtol=0, atol=1e-6)
    assert np.abs(product).max() > 0.1


def test_a_lost_term_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{ADDITION}.0.weight"]
    change(folder, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "layers.3.shared_transformer.self_attn.q_proj.weight: missing" in caught.value.message
    assert f"{ADDITION}.1.weight: unexpected" in caught.value.message


def test_a_term_of_another_shape_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{ADDITION}.0.weight"] = tensors[f"{ADDITION}.0.weight"][:2]
    change(folder, tensors)
    with pytest.raises(CheckpointError, match=rf"{ADDITION}.1.weight: shape \[\d+, 3\], the model"):
        load(folder)


def test_quantised_weights_are_refused_by_name(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    with pytest.raises(ConfigError, match="is not read for zamba2") as caught:
        config_from_hf(config)
    assert caught.value.param == "quantization_config"


@pytest.mark.parametrize("number", [0, 101])
def test_the_number_of_shared_layers_is_bounded(number: int) -> None:
    """The places of their tensors grow with the square of it."""
    kinds = ["mamba", *["hybrid"] * number]
    with pytest.raises(ConfigError, match="hybrid from 1 to 100 times") as caught:
        config_from_hf({"model_type": "zamba2", "layers_block_type": kinds})
    assert caught.value.param == "layers_block_type"


def test_the_default_configuration_has_nine_shared_layers() -> None:
    """Zamba2 2.7B: 54 layers of the files, and one more of ours for each of these."""
    config = config_from_hf({"model_type": "zamba2"})
    assert [config.num_layers, len(config.layers_with("attention"))] == [63, 9]
    sums = FAMILIES["zamba2"].sums
    assert sums is not None
    assert len(sums(config)) == 9 * 9


def test_the_longest_of_its_keys_is_that_of_long_contexts(folder: Path) -> None:
    assert read_model_config(folder).max_positions == 64
    assert config_from_hf({"model_type": "zamba2", "use_long_context": True}).max_positions == 16384
