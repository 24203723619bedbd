"""Matrices that keep the bits of a GGUF file: their entries, their bytes, and the logits of a model with them."""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from orca_jax.assembly.executor import arrange
from orca_jax.config import DType
from orca_jax.kernels.native import unpack_columns
from orca_jax.model.gguf.few_bits import BLOCK_KINDS, packed_blocks
from orca_jax.model.load import load_decoder, prepare_load
from orca_jax.model.packed import PackedBitsMatrix, PackedBitsTable
from orca_jax.model.transformer import Decoder
from tests.kernels.native.machine import library_of, needs_library
from tests.model.gguf.test_gguf import write
from tests.model.reference import REFERENCE, logits, mesh_of


def random_blocks(name: str, outputs: int, inputs: int) -> np.ndarray:
    """The bytes of a tensor [O, bytes] with random numbers, scales and minima."""
    draw, (values, num_bytes) = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[Kind[name]]
    blocks = draw.integers(0, 256, (outputs, inputs // values, num_bytes), np.uint8)
    factors = draw.uniform(-2, 2, (*blocks.shape[:2], 2)).astype(np.float16).view(np.uint8)
    begin = 208 if name == "Q6_K" else 0
    end = begin + (4 if BLOCK_KINDS[name].form.has_minima else 2)
    blocks[..., begin:end] = factors[..., : end - begin]
    return blocks.reshape(outputs, -1)


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_entries_and_bytes_are_those_of_the_file(name: str) -> None:
    stored = random_blocks(name, 64, 512)
    packed = packed_blocks(stored, BLOCK_KINDS[name], 32)
    assert stored.nbytes <= sum(array.nbytes for array in jax.tree.leaves(packed)) <= 1.05 * stored.nbytes
    found = unpack_columns(jax.tree.map(jnp.asarray, packed), jnp.arange(64))
    np.testing.assert_array_equal(found, gguf.dequantize(stored, Kind[name]))


def load_kept(path: Path, dtype: DType, devices: int) -> Decoder:
    """A decoder whose matrices have the bits of a file."""
    loading = prepare_load(path, dtype=dtype)
    assert loading.keep_bits is not None

    def form(decoder: Decoder) -> None:
        assert loading.keep_bits is not None
        arrange("cpu", decoder)
        loading.keep_bits(decoder, library_of(), devices)

    return loading.load(mesh_of(devices), arrange=form)


@needs_library
@pytest.mark.parametrize(
    ("name", "kind", "devices"),
    [
        ("qwen3", Kind.Q4_1, 1),
        pytest.param("qwen3", Kind.Q8_0, 2, marks=pytest.mark.slow),
        pytest.param("phi3-window", Kind.Q4_0, 1, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_the_dequantised_file(tmp_path: Path, name: str, kind: Kind, devices: int) -> None:
    """Some matrices have no packed form here. Queries, keys and values of phi3 are parts of one tensor."""
    path = write(tmp_path / "model.gguf", name, kind)
    kept = load_kept(path, "float32", devices)
    plain = load_decoder(path, dtype="float32", mesh=mesh_of(devices))
    assert isinstance(kept.unembedding.table, PackedBitsTable)
    assert any(isinstance(layer.kernel, PackedBitsMatrix) for block in kept.blocks for layer in block.linear_layers)
    ids = np.load(REFERENCE / name / "expected.npz")["ids_1"]
    ours, theirs = logits(kept, ids), logits(plain, ids)
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


def test_files_in_other_types_keep_nothing(tmp_path: Path) -> None:
    assert prepare_load(write(tmp_path / "model.gguf", "qwen3"), dtype="bfloat16").keep_bits is None
