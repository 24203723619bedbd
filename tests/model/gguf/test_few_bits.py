"""Matrices that keep the bits of a GGUF file: their entries, their bytes, and the logits of a model with them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gguf import GGMLQuantizationType as Kind
from jax.sharding import NamedSharding

from orca_jax.assembly.executor import arrange_for
from orca_jax.kernels.native import LayerRows, unpack_columns
from orca_jax.model.gguf.few_bits import BLOCK_KINDS, packed_blocks
from orca_jax.model.layers import Linear, multiply
from orca_jax.model.load import load_decoder, prepare_load
from orca_jax.model.matrices.few_bits import (
    MixedBitsMatrix,
    PackedBitsMatrix,
    PackedBitsTable,
    stored_bits,
)
from orca_jax.model.matrices.layout import layer_of
from orca_jax.model.sharding import partition_spec
from tests.covering import slow
from tests.kernels.native.machine import library_of, needs_library
from tests.model.gguf.test_gguf import write
from tests.model.reference import REFERENCE, logits, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do


def random_blocks(name: str, outputs: int, inputs: int, most: float = 2.0) -> np.ndarray:
    """The bytes of a tensor [O, bytes] with random numbers, and scales and minima between -`most` and `most`."""
    draw, (values, num_bytes) = np.random.default_rng(0), gguf.GGML_QUANT_SIZES[Kind[name]]
    blocks = draw.integers(0, 256, (outputs, inputs // values, num_bytes), np.uint8)
    factors = draw.uniform(-most, most, (*blocks.shape[:2], 2)).astype(np.float16).view(np.uint8)
    begin = 208 if name == "Q6_K" else 0
    end = begin + (4 if BLOCK_KINDS[name].form.has_minima else 2)
    blocks[..., begin:end] = factors[..., : end - begin]
    return blocks.reshape(outputs, -1)


@pytest.mark.parametrize("name", BLOCK_KINDS)
def test_entries_and_bytes_are_those_of_the_file(name: str) -> None:
    stored = random_blocks(name, 64, 512)
    packed = packed_blocks(stored, BLOCK_KINDS[name], 32)
    assert (
        stored.nbytes
        <= sum(array.nbytes for array in jax.tree.leaves(packed))
        <= 1.05 * stored.nbytes
    )
    found = unpack_columns(jax.tree.map(jnp.asarray, packed), jnp.arange(64))
    np.testing.assert_array_equal(found, gguf.dequantize(stored, Kind[name]))


@needs_library
@pytest.mark.parametrize("axes", [("embed", "mlp"), ("mlp", "embed")])
def test_a_layer_of_a_stack_in_two_forms_on_two_devices(axes: tuple[str, str]) -> None:
    """The layer is a value of the program."""
    names, x = (
        ["Q4_1", "Q5_0", "Q4_1"],
        np.random.default_rng(1).standard_normal((3, 512)).astype(np.float32),
    )
    stored, library = [random_blocks(name, 64, 512) for name in names], library_of()
    stored[2] = stored[2][::-1].copy()  # other numbers
    sharding = NamedSharding(mesh_of(2), partition_spec(("layers", *axes)))
    plain = nnx.Param(
        jax.ShapeDtypeStruct((3, 512, 64), jnp.float32, sharding=sharding), axes=("layers", *axes)
    )
    held = stored_bits(plain, library, 2, [BLOCK_KINDS[name].form for name in names])
    assert isinstance(held, MixedBitsMatrix) and held.form_of == (0, 1, 0)
    for form, layers in enumerate(([0, 2], [1])):
        packed = [
            packed_blocks(stored[layer], BLOCK_KINDS[names[layer]], library.width)
            for layer in layers
        ]
        stack = jax.tree.map(lambda *parts: np.stack(parts), *packed)
        for part in ("words", "scales", "minima"):
            if (variable := getattr(held.forms[form], part)) is not None:
                variable.set_value(
                    jax.device_put(getattr(stack, part), variable.get_value().sharding)
                )
    structure, state = nnx.split(held)

    @jax.jit
    def product(layer: jax.Array) -> jax.Array:
        own = [
            (path, layer_of(variable, LayerRows(layer, jnp.int32(3))))
            for path, variable in nnx.to_flat_state(state)
        ]
        return multiply(jnp.asarray(x), nnx.merge(structure, nnx.from_flat_state(own)))[0]

    for layer, name in enumerate(names):
        wanted = x @ gguf.dequantize(stored[layer], Kind[name]).T
        np.testing.assert_allclose(
            product(jnp.int32(layer)), wanted, atol=2e-6 * np.abs(wanted).max()
        )


def in_stacks(name: str) -> Kind:
    """The types of a file whose layers have the same ones."""
    return Kind.Q4_1 if "attn" in name else Kind.Q8_0


def mixed(name: str) -> Kind:
    """The types of a file that has more bits in some layers, as those of llama.cpp."""
    is_second = name.startswith("blk.1.")
    if "attn_v" in name or "ffn_up" in name:
        return Kind.Q5_1 if is_second else Kind.Q4_0
    return Kind.Q4_0 if "ffn_gate" in name and is_second else Kind.Q8_0


def partly(name: str) -> Kind:
    """The types of a file with a matrix that has few bits in one layer alone."""
    return Kind.F16 if "attn_v" in name and name.startswith("blk.1.") else Kind.Q4_0


@needs_library
@pytest.mark.parametrize(
    ("name", "kind", "devices", "form"),
    [
        slow("qwen3", in_stacks, 1, "stacks"),
        ("qwen3", mixed, 1, "stacks"),
        slow("qwen3", partly, 1, "stacks"),
        slow("qwen3", Kind.Q8_0, 2, "layers"),
        ("phi3-window", Kind.Q4_0, 1, "stacks"),
    ],
)
def test_logits_are_those_of_the_dequantised_file(
    tmp_path: Path, name: str, kind: Kind | Callable[[str], Kind], devices: int, form: str
) -> None:
    """Some matrices have no packed form here. Queries, keys and values of phi3 are parts of one tensor."""
    path = write(tmp_path / "model.gguf", name, kind)
    loading = prepare_load(path, dtype="float32")
    arranged = partial(arrange_for, loading.keep_bits, jax.devices()[:devices], library_of())
    kept = loading.load(mesh_of(devices), arrange=arranged)
    kept.pack(library_of(), devices)
    assert ("stacks" if kept.is_packed else "layers") == form
    assert isinstance(kept.unembedding.table, PackedBitsTable)
    kernels = [layer.kernel for _, layer in nnx.iter_modules(kept) if isinstance(layer, Linear)]
    assert any([isinstance(kernel, PackedBitsMatrix) for kernel in kernels])
    assert any([isinstance(kernel, MixedBitsMatrix) for kernel in kernels]) == (
        kind is mixed and form == "stacks"
    )
    plain = load_decoder(path, dtype="float32", mesh=mesh_of(devices))
    ids = np.load(REFERENCE / name / "expected.npz")["ids_1"]
    ours, theirs = logits(kept, ids), logits(plain, ids)
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


def test_files_in_other_types_keep_nothing(tmp_path: Path) -> None:
    assert prepare_load(write(tmp_path / "model.gguf", "qwen3"), dtype="bfloat16").keep_bits is None
