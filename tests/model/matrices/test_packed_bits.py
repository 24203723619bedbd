"""Decoders with quantised weights in the library: their logits, their shapes, and what has no packed form."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from orca_jax.assembly.executor import arrange
from orca_jax.kernels.native import Library
from orca_jax.model.describe import read_model_config
from orca_jax.model.layers import Table, multiply
from orca_jax.model.load import abstract_decoder, random_decoder
from orca_jax.model.matrices.few_bits import PackedBitsMatrix, PackedBitsTable, packed_bits
from orca_jax.model.matrices.quantise import quantise
from orca_jax.model.matrices.scaled import QuantisedExperts, QuantisedMatrix
from orca_jax.model.parameters import flat_parameters
from orca_jax.model.sharding import partition_spec
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import DType, ModelConfig, Quantization
from orca_jax.values.layer_config import ExpertsConfig
from orca_jax.values.platforms import platform_named
from tests.covering import slow
from tests.kernels.native.machine import library_of, needs_library
from tests.model.reference import logits, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")
IDS = np.arange(3, 40)
MORE_OF_EXPERTS = (
    ("int8", "bfloat16", 1),
    ("int4", "float32", 1),
    ("int8", "float32", 2),
)


def model(kind: Quantization) -> ModelConfig:
    tiny = read_model_config("preset:gpt2-tiny")
    return replace(tiny, layers=tiny.layers[:2], quantization=kind)


def drawn(kind: Quantization, dtype: DType, devices: int) -> Decoder:
    decoder: Decoder = nnx.clone(made(kind, dtype, devices))
    return decoder


@cache
def made(kind: Quantization, dtype: DType, devices: int) -> Decoder:
    decoder = random_decoder(model(kind), dtype=dtype, mesh=mesh_of(devices))
    arrange(platform_named("cpu"), decoder)
    return decoder


def packed(decoder: Decoder, library: Library, devices: int) -> Decoder:
    decoder.pack(library, devices)
    return decoder


def in_float32(decoder: Decoder) -> Decoder:
    """The same quantised weights, with products in float32."""
    for layer in (layer for block in decoder.blocks for layer in block.linear_layers):
        layer.kernel.dtype = jnp.dtype("float32")
    decoder.unembedding.table.dtype = jnp.dtype("float32")
    return decoder


@needs_library
@pytest.mark.parametrize("split", ["inputs", "outputs"])
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_a_matrix_on_two_devices(kind: Quantization, split: str) -> None:
    mesh, axes = mesh_of(2), ("mlp", "embed") if split == "inputs" else ("embed", "mlp")
    weight = jnp.asarray(np.random.default_rng(0).standard_normal((384, 64)), jnp.float32)
    stored, x = quantise(weight, kind), weight[:, :5].T
    plain = QuantisedMatrix(
        stored, axes, kind, jnp.dtype("float32"), 2 if split == "inputs" else 1, is_stacked=False
    )
    wanted = np.asarray(jax.jit(lambda x: multiply(x, plain)[0])(x))
    plain.values.set_value(jax.device_put(stored.values, NamedSharding(mesh, partition_spec(axes))))
    narrow = 4e-3 if kind == "fp8" else 1e-5  # activations in bfloat16, or in 16 bits
    for dtype, close in (("float32", 1e-6), ("bfloat16", narrow)):
        plain.dtype = jnp.dtype(dtype)
        held = packed_bits(plain, library_of(), 2)
        assert isinstance(held, PackedBitsMatrix)
        found = np.asarray(jax.jit(lambda x, held=held: multiply(x, held)[0])(x))
        np.testing.assert_allclose(found, wanted, atol=close * np.abs(wanted).max(), rtol=0)


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "devices"), [("int8", 2), ("int4", 1)])
def test_logits_are_those_of_xla(kind: Quantization, devices: int) -> None:
    """In float32 they differ in the order of sums. With 16 bits they are nearer to them than with bfloat16."""
    library, draw = library_of(), partial(drawn, kind, "bfloat16", devices)
    wanted = logits(in_float32(draw()), IDS)
    ours = packed(in_float32(draw()), library, devices)
    np.testing.assert_allclose(logits(ours, IDS), wanted, atol=2e-5 * np.abs(wanted).max())
    by_xla, by_library = logits(draw(), IDS), logits(packed(draw(), library, devices), IDS)
    assert 5 * np.abs(by_library - wanted).mean() < np.abs(by_xla - wanted).mean()


@needs_library
def test_every_matrix_and_the_table_are_packed() -> None:
    decoder = packed(drawn("int4", "float32", 1), library_of(), 1)
    kernels = [layer.kernel for block in decoder.blocks for layer in block.linear_layers]
    assert {type(kernel) for kernel in kernels} == {PackedBitsMatrix}
    table = decoder.unembedding.table
    assert isinstance(table, PackedBitsTable) and table.num_rows == decoder.unembedding.num_rows


@needs_library
def test_the_rows_of_a_packed_table() -> None:
    """One out of range gets the nearest row."""
    plain, library = drawn("int4", "float32", 1), library_of()
    index = jnp.array([0, 7, 31, 32, 300, 10**6, -1])
    unembedding: Table = plain.unembedding
    wanted = np.asarray(unembedding(jnp.clip(index, 0, unembedding.num_rows - 1)))
    np.testing.assert_array_equal(packed(plain, library, 1).unembedding(index), wanted)


@pytest.mark.parametrize("kind", [slow("int8"), "int4"])
def test_shapes_are_those_of_the_packed_values(kind: Quantization) -> None:
    """Programs are compiled from them before the weights are read."""
    library = library_of()
    decoder: Decoder = nnx.merge(*abstract_decoder(model(kind), "float32", mesh_of(2)))
    arrange(platform_named("cpu"), decoder, library)
    shapes = flat_parameters(nnx.state(packed(decoder, library, 2)))
    for path, value in flat_parameters(
        nnx.state(packed(drawn(kind, "float32", 2), library, 2))
    ).items():
        assert (value.shape, value.dtype) == (shapes[path].shape, shapes[path].dtype), path
        assert value.sharding.is_equivalent_to(shapes[path].sharding, value.ndim), path


@needs_library
@pytest.mark.parametrize(
    ("kind", "dtype", "devices"),
    [
        ("int4", "bfloat16", 1),
        *(slow(*case) for case in MORE_OF_EXPERTS),
    ],
)
def test_experts_are_packed_on_one_device(kind: Quantization, dtype: DType, devices: int) -> None:
    """In float32 they differ from XLA's in the order of sums. With 16 bits they are nearer to it than bfloat16."""
    experts = ExpertsConfig(count=5, per_token=2, shared_dim=32)
    config = replace(model(kind), layers=model(kind).layers[:1], gated_mlp=True, experts=experts)
    stored = random_decoder(config, dtype=dtype, mesh=mesh_of(devices))
    arrange(platform_named("cpu"), stored)
    found = []
    for type_of_products, library in (("float32", None), (dtype, None), (dtype, library_of())):
        decoder: Decoder = nnx.clone(stored)
        (block,) = decoder.blocks
        layers = [*block.linear_layers, *block.mlp.shared.mlp.linear_layers]
        for held in (*block.mlp.matrices.values(), *(layer.kernel for layer in layers)):
            held.dtype = jnp.dtype(type_of_products)
        decoder.unembedding.table.dtype = jnp.dtype(type_of_products)
        if library is not None:
            decoder.pack(library, devices)
            kinds = {type(held) for held in block.mlp.matrices.values()}
            assert kinds == {PackedBitsMatrix if devices == 1 else QuantisedExperts}
        found.append(logits(decoder, IDS))
    wanted, by_xla, by_library = found
    if dtype == "float32":
        np.testing.assert_allclose(by_library, wanted, atol=2e-5 * np.abs(wanted).max())
    elif devices == 1:
        assert 5 * np.abs(by_library - wanted).mean() < np.abs(by_xla - wanted).mean()


def test_what_the_library_does_not_read_stays() -> None:
    """Matrices without whole blocks on each device."""
    decoder = packed(drawn("int4", "float32", 1), Library(1 << 20), 1)
    kernels = [layer.kernel for block in decoder.blocks for layer in block.linear_layers]
    assert {type(kernel) for kernel in kernels} == {QuantisedMatrix}


def test_a_split_matrix_has_its_scales_on_its_devices() -> None:
    """Each device has the groups of its inputs; the scale of all inputs is on all of them."""
    for kind, spec in (("int4", "tensor"), ("int8", None)):
        decoder = packed(drawn(kind, "float32", 2), library_of(), 2)
        down = decoder.blocks[0].mlp.down.kernel
        assert isinstance(down, PackedBitsMatrix)
        assert (
            down.scales.get_value().sharding.spec[1] == spec
            and down.words.get_value().sharding.spec[1] == "tensor"
        )
        assert isinstance(down.scales.get_value(), jax.Array)
