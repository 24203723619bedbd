"""Models in published forms have the weights and the logits of the same models with plain weights."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from orca_jax.assembly.executor import arrange_for
from orca_jax.exec.cache import weight_bytes
from orca_jax.kernels.native import Library
from orca_jax.model.experts import Experts
from orca_jax.model.layers import Linear
from orca_jax.model.load import load_decoder, prepare_load
from orca_jax.model.matrices.few_bits import PackedBitsMatrix
from orca_jax.model.matrices.scaled import QuantisedExperts, QuantisedMatrix
from orca_jax.model.parameters import flat_parameters
from orca_jax.model.stages import whole
from orca_jax.model.transformer import Decoder
from orca_jax.tools.plan.memory import stage_weights
from orca_jax.values.errors import CheckpointError
from tests.covering import covering
from tests.kernels.native.machine import library_of, needs_library
from tests.model.published.directories import FORMS, write
from tests.model.reference import logits, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

IDS = np.arange(1, 30) * 7 % 97
SPLIT = ("awq", "fp8-groups", "gptq", "nvfp4")
"""Forms whose matrices have values for groups of inputs, which two devices divide."""


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_the_plain_model(tmp_path: Path, form: str) -> None:
    """Without a library, matrices are dequantised as they are read. One layer is plain in the files."""
    published, plain = write(tmp_path, "llama", form, ("1.mlp.up_proj",))
    compare(published, plain, devices=1)


@pytest.mark.parametrize(
    ("model", "form", "devices"),
    [
        ("phi3", "awq", 1),
        ("phi3", "fp8-blocks", 2),
        ("mixtral", "gptq", 1),
        ("llama", "gptq", 2),
        ("llama", "packed", 2),
        ("llama", "nvfp4", 2),
    ],
)
def test_joined_layers_experts_and_several_devices(
    tmp_path: Path, model: str, form: str, devices: int
) -> None:
    compare(*write(tmp_path, model, form), devices=devices)


def compare(published: Path, plain: Path, devices: int) -> None:
    """Check that two directories have the same parameters, bit by bit."""
    states = [
        nnx.state(load_decoder(directory, dtype="float32", mesh=mesh_of(devices)))
        for directory in (published, plain)
    ]
    ours, theirs = (flat_parameters(state) for state in states)
    assert ours.keys() == theirs.keys()
    for path, values in theirs.items():
        np.testing.assert_array_equal(ours[path], values, err_msg=path)


@needs_library
@pytest.mark.parametrize(
    ("model", "form", "devices"),
    [
        *[("llama", form, 1) for form in ("packed", "int8", "fp8-rows", "fp8")],
        *[("llama", form, 2) for form in SPLIT],
        ("phi3", "awq", 1),
        ("phi3", "fp8-parts", 1),
        ("mixtral", "packed", 1),
        ("mixtral", "nvfp4", 1),
    ],
)
def test_logits_of_kept_bits(tmp_path: Path, model: str, form: str, devices: int) -> None:
    published, plain = write(tmp_path, model, form)
    kept = kept_decoder(published, devices, library_of())
    found = [
        layer.kernel
        for _, layer in nnx.iter_modules(kept)
        if isinstance(layer, Linear) and isinstance(layer.kernel, PackedBitsMatrix)
    ]
    assert found
    if model == "mixtral":
        experts = [layer for _, layer in nnx.iter_modules(kept) if isinstance(layer, Experts)]
        assert all([isinstance(layer.gate, PackedBitsMatrix) for layer in experts])
    ours = logits(kept, IDS)
    theirs = logits(load_decoder(plain, dtype="float32", mesh=mesh_of(devices)), IDS)
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("model", "form", "devices"),
    covering(
        [
            *[("llama", form, 1) for form in FORMS],
            *[("llama", form, 2) for form in ("awq", "gptq", "int8", "fp8-blocks", "nvfp4")],
            ("phi3", "awq", 2),
            ("phi3", "fp8", 1),
            *[("mixtral", form, 1) for form in ("gptq", "awq", "fp8-groups", "nvfp4")],
            *[("mixtral", form, 2) for form in ("packed", "int8", "fp8", "nvfp4")],
        ],
        size=1,
    ),
)
def test_logits_of_bits_that_xla_reads(tmp_path: Path, model: str, form: str, devices: int) -> None:
    """Dequantised are blocks that do not fill a row, and experts whose inputs have an order of their own."""
    published, plain = write(tmp_path, model, form)
    kept = kept_decoder(published, devices, None)
    found = [
        layer.kernel
        for _, layer in nnx.iter_modules(kept)
        if isinstance(layer, Linear) and isinstance(layer.kernel, QuantisedMatrix)
    ]
    assert bool(found) == (form != "fp8-blocks")
    if model == "mixtral":
        experts = [layer for _, layer in nnx.iter_modules(kept) if isinstance(layer, Experts)]
        has_form = {isinstance(layer.down, QuantisedExperts) for layer in experts}
        assert has_form == {form != "gptq"}
    ours = logits(kept, IDS)
    theirs = logits(load_decoder(plain, dtype="float32", mesh=mesh_of(devices)), IDS)
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


@needs_library
def test_a_layer_that_is_plain_keeps_the_bits_of_the_others(tmp_path: Path) -> None:
    published, plain = write(tmp_path, "llama", "awq", ("0.self_attn.q_proj",))
    ours = logits(kept_decoder(published, 1, library_of()), IDS)
    theirs = logits(load_decoder(plain, dtype="float32", mesh=mesh_of(1)), IDS)
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


def test_files_that_become_plain_while_they_are_read_are_refused(tmp_path: Path) -> None:
    published, plain = write(tmp_path, "llama", "awq")
    loading = prepare_load(published, dtype="float32")
    assert loading.keep_bits is not None
    arranged = partial(arrange_for, loading.keep_bits, jax.devices()[:1], None)

    def replaced(decoder: Decoder) -> None:
        arranged(decoder)
        shutil.copy(plain / "model.safetensors", published)

    with pytest.raises(CheckpointError, match="the files have changed") as caught:
        loading.load(mesh_of(1), arrange=replaced)
    assert caught.value.source == str(published)


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_counts_the_bytes_that_are_kept(tmp_path: Path, form: str) -> None:
    """Symmetric numbers of 4 bits, whose zero points a plan counts, are the only ones with fewer bytes."""
    published, _ = write(tmp_path, "llama", form)
    kept = kept_decoder(published, 1, None)
    config = kept.config
    span = whole(config)
    planned = stage_weights(config, "float32", 1, span)
    dense = stage_weights(replace(config, stored=None), "float32", 1, span)
    held = weight_bytes(kept)
    assert planned == held
    assert (planned < dense) == (form != "fp8-blocks")


def kept_decoder(directory: Path, devices: int, library: Library | None) -> Decoder:
    """The decoder whose matrices keep their bits."""
    loading = prepare_load(directory, dtype="float32")
    assert loading.keep_bits is not None
    arranged = partial(arrange_for, loading.keep_bits, jax.devices()[:devices], library)
    kept = loading.load(mesh_of(devices), arrange=arranged)
    if library is not None:
        kept.pack(library, devices)
    return kept
