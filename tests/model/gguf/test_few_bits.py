"""Matrices that keep the bits of a GGUF file: their entries, their bytes, and the logits of a model with them."""

from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Kind

from orca_jax.assembly.executor import arrange
from orca_jax.kernels.native import unpack_columns
from orca_jax.model.gguf.few_bits import BLOCK_KINDS, packed_blocks
from orca_jax.model.load import load_decoder, prepare_load
from orca_jax.model.packed import PackedBitsMatrix, PackedBitsTable
from orca_jax.model.transformer import Decoder
from tests.kernels.native.machine import library_of, needs_library
from tests.model.gguf.test_gguf import write
from tests.model.reference import REFERENCE, logits, mesh_of


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_entries_and_bytes_are_those_of_the_file(name: str) -> None:
    numbers = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    stored = gguf.quantize(numbers, Kind[name])
    packed = packed_blocks(stored, BLOCK_KINDS[name], 32)
    assert sum(array.nbytes for array in jax.tree.leaves(packed)) == stored.nbytes
    found = unpack_columns(jax.tree.map(jnp.asarray, packed), jnp.arange(64))
    np.testing.assert_array_equal(found, gguf.dequantize(stored, Kind[name]))


def load_kept(path: Path) -> Decoder:
    """A decoder in bfloat16 whose matrices have the bits of a file."""
    loading = prepare_load(path, dtype="bfloat16")
    assert loading.keep_bits is not None

    def form(decoder: Decoder) -> None:
        assert loading.keep_bits is not None
        arrange("cpu", decoder)
        loading.keep_bits(decoder, library_of(), 1)

    return loading.load(mesh_of(1), arrange=form)


@needs_library
@pytest.mark.parametrize("kind", [Kind.Q4_1, pytest.param(Kind.Q8_0, marks=pytest.mark.slow)])
def test_logits_are_those_of_the_dequantised_file(tmp_path: Path, kind: Kind) -> None:
    """The matrices of the MLP have no packed form here. They and all vectors are rounded to bfloat16."""
    name = "qwen3"
    path = write(tmp_path / "model.gguf", name, kind)
    kept, plain = load_kept(path), load_decoder(path, dtype="float32", mesh=mesh_of(1))
    assert isinstance(kept.unembedding.table, PackedBitsTable)
    for block in kept.blocks:  # type: ignore[union-attr]
        kinds = {type(layer.kernel) for layer in block.linear_layers}
        assert kinds == {nnx.Param, PackedBitsMatrix}
    ids = np.load(REFERENCE / name / "expected.npz")["ids_1"]
    ours, theirs = logits(kept, ids), logits(plain, ids)
    assert np.abs(ours - theirs).max() <= 2e-2 * np.abs(theirs).max()


@needs_library
def test_float32_and_files_in_other_types_keep_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", "qwen3", Kind.Q4_0)
    assert prepare_load(path, dtype="float32").keep_bits is None
    assert prepare_load(write(tmp_path / "b.gguf", "qwen3"), dtype="bfloat16").keep_bits is None
