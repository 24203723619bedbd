"""GGUF files of mixtures: the same parameters as from safetensors, and experts that keep the file's bits."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file

from orca_jax.assembly.executor import arrange_for
from orca_jax.helpers.gguf_file.header import GgufTensor
from orca_jax.model.gguf.weights import _by_expert
from orca_jax.model.load import load_decoder, prepare_load
from orca_jax.model.matrices.few_bits import MixedBitsMatrix, PackedBitsMatrix
from orca_jax.model.matrices.packed import PackedMatrix
from orca_jax.model.parameters import flat_parameters
from orca_jax.values.errors import CheckpointError
from tests.covering import slow
from tests.kernels.native.machine import library_of, needs_library
from tests.model.gguf.test_gguf import tensors_of, write
from tests.model.reference import REFERENCE, logits, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do
WIDER = {12: 64, 16: 32, 24: 64, 32: 64, 64: 128}
IDS = np.arange(3, 40)


def wider(name: str, folder: Path) -> Path:
    """A directory with a random mixture whose matrices have packed forms."""
    directory, draw = folder / name, np.random.default_rng(0)
    directory.mkdir()
    config = json.loads((REFERENCE / name / "config.json").read_text())
    for key in ("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim"):
        if config.get(key):
            config[key] = WIDER.get(config[key], 64)
    config |= {"norm_topk_prob": True} if name == "qwen3_moe" else {"sliding_window": None}
    (directory / "config.json").write_text(json.dumps(config))
    drawn = {
        key: (draw.standard_normal([WIDER.get(size, size) for size in values.shape]) / 8).astype(
            np.float32
        )
        for key, values in tensors_of(name).items()
    }
    save_file(drawn, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("name", ["mixtral", slow("qwen3_moe")])
def test_parameters_are_those_of_safetensors(tmp_path: Path, name: str) -> None:
    directory = wider(name, tmp_path)
    path = write(tmp_path / "model.gguf", str(directory))
    ours, theirs = (
        load_decoder(source, dtype="float32", mesh=mesh_of(1)) for source in (path, directory)
    )
    found, expected = (flat_parameters(nnx.state(decoder)) for decoder in (ours, theirs))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(value, expected[key]) for key, value in found.items())
    assert (ours.config.experts, ours.config.family) == (theirs.config.experts, name)


def mixed(name: str) -> Kind:
    """Types as in files of llama.cpp, with more bits for a projection of some layers."""
    if "ffn_down" in name and name.startswith("blk.1."):
        return Kind.Q8_0
    return Kind.F32 if "ffn_gate_inp" in name else Kind.Q4_0


def partly(name: str) -> Kind:
    """Types of a file with a projection in 16 bits."""
    return Kind.F16 if "ffn_down" in name else mixed(name)


@needs_library
@pytest.mark.parametrize(
    ("name", "kind", "held"),
    [
        ("qwen3_moe", mixed, [PackedBitsMatrix, PackedBitsMatrix, MixedBitsMatrix]),
        slow("mixtral", partly, [PackedMatrix] * 3),
    ],
)
def test_logits_are_those_of_the_dequantised_file(
    tmp_path: Path, name: str, kind: Callable[[str], Kind], held: list[type]
) -> None:
    """Experts keep their bits if all three projections have few."""
    path = write(tmp_path / "model.gguf", str(wider(name, tmp_path)), kind)
    loading = prepare_load(path, dtype="float32")
    arranged = partial(arrange_for, loading.keep_bits, jax.devices()[:1], library_of())
    kept = loading.load(mesh_of(1), arrange=arranged)
    kept.pack(library_of(), 1)
    assert kept.is_packed and [type(each) for each in kept.blocks.mlp.matrices.values()] == held  # type: ignore[union-attr]
    plain = load_decoder(path, dtype="float32", mesh=mesh_of(1))
    ours, theirs = logits(kept, IDS), logits(plain, IDS)
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


def test_a_tensor_without_an_expert_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", str(wider("qwen3_moe", tmp_path)), expert_count=9)
    with pytest.raises(CheckpointError) as caught:
        load_decoder(path, dtype="float32", mesh=mesh_of(1))
    assert "model.layers.1.mlp.experts.8.up_proj.weight: missing" in caught.value.problems


def test_experts_that_the_model_does_not_have_are_not_listed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this, a tensor of 25 bytes became 4,096 entries before anything was compared."""
    small = [GgufTensor((4096, 1, 1), Kind.F32, 0, 4)] * 200
    given = {f"blk.{layer}.any.weight": tensor for layer, tensor in enumerate(small)}
    assert _by_expert(tmp_path, given, 8) == given and _by_expert(tmp_path, given, 0) == given
    with pytest.raises(
        CheckpointError,
        match="its 200 tensors of 4096 experts have 819200 matrices; at most 500000",
    ):
        _by_expert(tmp_path, given, 4096)
    path = write(tmp_path / "model.gguf", str(wider("mixtral", tmp_path)), **{"expert_count": 4096})
    with pytest.raises(CheckpointError, match="2 layers of 4096 experts, but the files contain"):
        load_decoder(path, dtype="float32", mesh=mesh_of(1))
