"""Matrices of experts in one tensor, plain and in MXFP4."""

import importlib
import os
from functools import partial
from itertools import chain
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from orca_jax.assembly.executor import arrange_for
from orca_jax.exec.cache import weight_bytes
from orca_jax.kernels.matmul import Quantised
from orca_jax.model.experts import Experts
from orca_jax.model.files.expert_stacks import Mxfp4Matrix, e2m1_numbers, with_matrices
from orca_jax.model.files.opened import LocalFile
from orca_jax.model.files.safetensors import StoredTensor
from orca_jax.model.files.stripes import DTYPES
from orca_jax.model.load import load_decoder, prepare_load
from orca_jax.model.matrices.few_bits import PackedBitsMatrix
from orca_jax.model.matrices.quantise import expand
from orca_jax.model.matrices.scaled import QuantisedExperts
from orca_jax.model.parameters import flat_parameters
from orca_jax.model.published.mxfp4 import Mxfp4Bits
from orca_jax.model.stages import whole
from orca_jax.model.weight_files import SINGLE
from orca_jax.tools.plan.memory import stage_weights
from orca_jax.values.errors import CheckpointError
from tests.covering import slow
from tests.kernels.native.machine import library_of, needs_library
from tests.model.recorded.record import load
from tests.model.reference import logits, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do
# Codes of four bits, and their numbers by the specification.
NUMBERS = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0, 9: -0.5, 15: -6.0}


def test_numbers_and_scales(tmp_path: Path) -> None:
    """Two rows of 32 numbers: the first of each byte is in its low bits. A scale is a power of two, 127 for one."""
    first = bytes([0x10, 0x32, 0x54, 0x76, 0xF9] + [0] * 11)  # 0 0.5 1 1.5 2 3 4 6 -0.5 -6
    path = tmp_path / "numbers"
    path.write_bytes(first + bytes(16) + bytes([128, 126]))
    descriptor = os.open(path, os.O_RDONLY)
    file = LocalFile(descriptor)
    matrix = Mxfp4Matrix("x", 2, 32, DTYPES["BF16"], file, 0, 32, file)
    assert Mxfp4Bits(matrix, None).form.is_wide, "a power of two may be below those of float16"
    values = np.empty((2, 32), matrix.dtype)
    matrix.read_into(0, values)
    assert values[0, :10].astype(float).tolist() == [
        2 * NUMBERS[code] for code in (0, 1, 2, 3, 4, 5, 6, 7, 9, 15)
    ]
    assert not values[0, 10:].any() and not values[1].any()
    path.write_bytes(bytes(16) + first + bytes([128, 126]))
    matrix.read_into(1, values[1:])
    os.close(descriptor)
    assert values[1, :4].astype(float).tolist() == [0.0, 0.25, 0.5, 0.75]


def test_a_stack_becomes_a_matrix_for_each_expert() -> None:
    tensors = {
        "a": StoredTensor("F32", (2, 3, 4), 100, LocalFile(7)),
        "b": StoredTensor("F32", (5, 4), 8, LocalFile(7)),
    }
    found, rows = with_matrices(tensors)
    assert (
        found["a[1]"] == StoredTensor("F32", (3, 4), 148, LocalFile(7))
        and "a" not in found
        and found["b"] == tensors["b"]
    )
    assert rows.keys() == {"a[0]", "a[1]"} and (rows["a[1]"].num_rows, rows["a[1]"].order) == (
        3,
        (7, 148),
    )


def test_empty_stacks_stay_whole() -> None:
    """A file of some kilobytes may claim thousands of them, each of 4,096 experts."""
    tensors = {
        "a": StoredTensor("F32", (4096, 0, 4), 100, LocalFile(7)),
        "b_blocks": StoredTensor("U8", (4096, 2, 0, 16), 100, LocalFile(7)),
    }
    tensors["b_scales"] = StoredTensor("U8", (4096, 2, 0), 100, LocalFile(7))
    assert with_matrices(tensors) == (tensors, {})


def write_mxfp4(folder: Path) -> tuple[Path, Path]:
    """A gpt-oss with experts in MXFP4, and the same with plain ones."""
    model = load("gpt_oss")[2]
    plain = folder / "plain"
    packed = folder / "packed"
    plain.mkdir()
    packed.mkdir()
    model.write(plain)
    tensors = load_file(plain / SINGLE)
    draw = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        codes = draw.integers(0, 16, (experts, outputs, inputs // 32, 16, 2)).astype(np.uint8)
        scales = draw.integers(122, 128, (experts, outputs, inputs // 32)).astype(np.uint8)
        numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7] * np.where(
            codes & 8, -1, 1
        )
        values = (
            numbers.reshape(*scales.shape, 32) * np.exp2(scales.astype(np.float32) - 127)[..., None]
        )
        tensors[name] = (
            values.reshape(experts, outputs, inputs).swapaxes(1, 2).astype(np.float32).copy()
        )
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = (
            codes[..., 0] | codes[..., 1] << 4,
            scales,
        )
    own = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(("_blocks", "_scales"))
    }
    save_file(own, plain / SINGLE, metadata={"format": "pt"})
    stacks = {name for name in own if f"{name}_blocks" in tensors}
    others = {name: tensor for name, tensor in tensors.items() if name not in stacks}
    model._replace(config={**model.config, "quantization_config": {"quant_method": "mxfp4"}}).write(
        packed
    )
    save_file(others, packed / SINGLE, metadata={"format": "pt"})
    return packed, plain


@needs_library
def test_experts_in_mxfp4_keep_their_bits(tmp_path: Path) -> None:
    packed, plain = write_mxfp4(tmp_path)
    loading = prepare_load(packed, dtype="float32")
    assert loading.keep_bits is not None
    library = library_of()
    arranged = partial(arrange_for, loading.keep_bits, jax.devices()[:1], library)
    kept = loading.load(mesh_of(1), arrange=arranged)
    kept.pack(library, 1)
    experts = [module for _, module in nnx.iter_modules(kept) if isinstance(module, Experts)]
    assert experts
    for held in chain.from_iterable(module.matrices.values() for module in experts):
        assert isinstance(held, PackedBitsMatrix) and held.bits == 5
    ids = np.arange(1, 20)
    ours = logits(kept, ids)
    theirs = logits(load_decoder(plain, dtype="float32", mesh=mesh_of(1)), ids)
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize("devices", [slow(1), 2])
def test_xla_reads_the_bits_of_mxfp4(tmp_path: Path, devices: int) -> None:
    packed, plain = write_mxfp4(tmp_path)
    loading = prepare_load(packed, dtype="float32")
    assert loading.keep_bits is not None
    arranged = partial(arrange_for, loading.keep_bits, jax.devices()[:devices], None)
    kept = loading.load(mesh_of(devices), arrange=arranged)
    experts = [module for _, module in nnx.iter_modules(kept) if isinstance(module, Experts)]
    for held in chain.from_iterable(module.matrices.values() for module in experts):
        assert isinstance(held, QuantisedExperts) and held.kind == "fp4"
    config = kept.config
    assert stage_weights(config, "float32", devices, whole(config)) == weight_bytes(kept)
    ids = np.arange(1, 20)
    ours = logits(kept, ids)
    theirs = logits(load_decoder(plain, dtype="float32", mesh=mesh_of(devices)), ids)
    np.testing.assert_allclose(ours, theirs, atol=2e-5 * np.abs(theirs).max(), rtol=0)


@pytest.mark.parametrize("kind", ["blocks", "whole"])
def test_products_and_entries_of_e2m1(kind: str) -> None:
    """All bytes, by the table of numbers, with half of the scales."""
    stored = np.arange(256, dtype=np.uint8).reshape(64, 4)  # two inputs in a byte
    scale = np.exp2(np.arange(-8, 8).reshape(4, 4)).astype(np.float32)
    numbers = e2m1_numbers(np.ascontiguousarray(stored.T)).T
    entries = numbers * 2 * np.repeat(scale, 32, axis=0)
    weight = Quantised(jnp.asarray(stored.view(np.int8)), jnp.asarray(scale))
    np.testing.assert_array_equal(expand(weight, "fp4", jnp.dtype(jnp.float32)), entries)
    x = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)
    module = importlib.import_module(f"orca_jax.kernels.matmul.{kind}")
    found = module.multiply(jnp.asarray(x), weight, "fp4", 1)
    np.testing.assert_allclose(found, x @ entries, rtol=1e-5, atol=1e-3)


def test_experts_in_mxfp4_are_those_of_the_plain_file(tmp_path: Path) -> None:
    packed, plain = write_mxfp4(tmp_path)
    one, other = (
        flat_parameters(nnx.state(load_decoder(folder, dtype="float32", mesh=mesh_of(1))))
        for folder in (plain, packed)
    )
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(other[path]), err_msg=path)
    assert jnp.abs(one["blocks.mlp.gate"]).max() > 1
    others = load_file(packed / SINGLE)
    broken = {
        name: tensor[:, :-1] if name.endswith("_scales") else tensor
        for name, tensor in others.items()
    }
    save_file(broken, packed / SINGLE, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"gate_up_proj\[0\]: missing"):
        load_decoder(packed, dtype="float32", mesh=mesh_of(1))
