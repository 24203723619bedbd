"""Packed decoders: their logits, their shapes, and the parameters that have no packed form."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orca_jax.assembly.executor import arrange
from orca_jax.exec.compile import CompileCounter
from orca_jax.kernels.native import Library
from orca_jax.model.block import AttentionOnly
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import abstract_decoder
from orca_jax.model.matrices.packed import (
    PackedMatrix,
    PackedTable,
    held_values,
    plain_shape,
    values_of_host,
)
from orca_jax.model.parameters import flat_parameters, path_of
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import DType, ModelConfig, Quantization
from orca_jax.values.layer_config import ExpertsConfig
from orca_jax.values.platforms import platform_named
from tests.covering import slow
from tests.kernels.native.machine import library_of, needs_library
from tests.model.reference import dense_attention, logits, mesh_of, random_of

pytestmark = pytest.mark.usefixtures("quick_compiles")
WIDE = Library(32)
IDS, EXPERTS = np.arange(3, 40), ExpertsConfig(count=5, per_token=2)


@cache
def model() -> ModelConfig:
    tiny = read_model_config("preset:gpt2-tiny")
    return replace(tiny, layers=tiny.layers[:2])


def shapes(devices: int, library: Library = WIDE) -> nnx.State:
    """The shapes of a packed decoder."""
    mesh = mesh_of(devices)
    decoder: Decoder = nnx.merge(*abstract_decoder(model(), "float32", mesh))
    arrange(platform_named("cpu"), decoder, library)
    decoder.pack(library, devices)
    return nnx.state(decoder)


@cache
def random(dtype: DType, devices: int, *, is_packed: bool) -> Decoder:
    decoder = random_of(model(), dtype, devices)
    library = library_of() if is_packed else None
    arrange(platform_named("cpu"), decoder, library)
    if library is not None:
        decoder.pack(library, devices)
    return decoder


@needs_library
@pytest.mark.parametrize("devices", [slow(1), 2])
@pytest.mark.parametrize("dtype", ["float32", slow("bfloat16")])
def test_logits_are_those_of_plain_matrices(dtype: DType, devices: int) -> None:
    decoder = random(dtype, devices, is_packed=True)
    kinds = {type(variable) for _, variable in nnx.to_flat_state(nnx.state(decoder))}
    assert {PackedMatrix, PackedTable} <= kinds
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(
        logits(decoder, IDS), logits(random(dtype, devices, is_packed=False), IDS), atol=tolerance
    )


@needs_library
@pytest.mark.parametrize("devices", [1, slow(2)])
def test_experts_are_packed_on_one_device(devices: int) -> None:
    """Each reads its part of the stack of all layers and experts, and multiplies the rows that chose it alone."""
    config, found = replace(model(), gated_mlp=True, experts=EXPERTS), []
    for library in (None, library_of()):
        decoder = random_of(config, "float32", devices)
        arrange(platform_named("cpu"), decoder, library)
        if library is not None:
            decoder.pack(library, devices)
            block = decoder.blocks if decoder.is_packed else decoder.blocks[0]
            assert isinstance(block.mlp.up, PackedMatrix) == decoder.is_packed == (devices == 1)
        found.append(logits(decoder, IDS))
    np.testing.assert_allclose(found[1], found[0], atol=1e-5)


@needs_library
@pytest.mark.parametrize("quantization", [slow(None), "int4"])
def test_a_gated_layer_has_four_calls(quantization: Quantization | None) -> None:
    """One for queries, keys and values, and one for gate and up. The rows of the table are not a product."""
    config = replace(model(), layers=model().layers[:1], gated_mlp=True, quantization=quantization)
    decoder = random_of(config, "float32", 1)
    ids = jnp.arange(8, dtype=jnp.int32)
    arrange(platform_named("cpu"), decoder)
    decoder.pack(library_of(), 1)
    lowered = (
        jax.jit(lambda decoder: decoder(ids, ids, dense_attention(config), 0)[0])
        .lower(decoder)
        .as_text()
    )
    assert lowered.count("_products(") == 4


@needs_library
@pytest.mark.parametrize(("dtype", "devices"), [("float32", 2), slow("bfloat16", 1)])
def test_rows_of_a_packed_table(dtype: DType, devices: int) -> None:
    """One out of range gets the nearest row."""
    plain = random(dtype, devices, is_packed=False)
    held = random(dtype, devices, is_packed=True)
    index = jnp.array([0, 7, 31, 32, 511, 10**6, -1])
    table = held.unembedding
    assert isinstance(table.table, PackedTable) and table.num_rows == plain.unembedding.num_rows
    wanted = plain.unembedding(jnp.clip(index, 0, table.num_rows - 1))
    np.testing.assert_array_equal(jax.jit(table)(index), wanted)


@needs_library
@pytest.mark.parametrize(
    ("num_layers", "keep"),
    [
        *(slow(*case) for case in ((1, (5,)), (2, None))),
        (2, (0, 3, 3)),
    ],
)
def test_matrices_in_stacks_change_no_bit(num_layers: int, keep: tuple[int, ...] | None) -> None:
    """A loop whose body reads the stack, and a switch between layers with matrices of their own."""
    config = replace(model(), layers=model().layers[:1] * num_layers)
    ids = jnp.arange(8, dtype=jnp.int32)
    kept = None if keep is None else jnp.array(keep, jnp.int32)

    def hidden(library: Library | None) -> np.ndarray:
        decoder = random_of(config, "float32", 2)
        arrange(platform_named("cpu"), decoder, library)
        decoder.pack(library_of(), 2)
        assert (decoder.is_packed, decoder.is_switched) == (library is not None, library is None)
        run = jax.jit(lambda decoder: decoder(ids, ids, dense_attention(config), 0, kept)[0])
        return np.asarray(run(decoder))

    stacked = hidden(library_of())
    assert stacked.shape[0] == (8 if keep is None else len(keep))
    np.testing.assert_array_equal(stacked, hidden(None))


@needs_library
@pytest.mark.parametrize(
    ("keep", "experts"),
    [
        *(slow(keep, None) for keep in (None, (4, 1, 0, 0))),
        ((4, 1, 0, 0), EXPERTS),
    ],
)
def test_padding_changes_no_bit_of_a_token(
    keep: tuple[int, ...] | None, experts: ExpertsConfig | None
) -> None:
    """Nor does leaving it out: the results of padding are undefined."""
    decoder = random_of(replace(model(), experts=experts), "float32", 1)
    arrange(platform_named("cpu"), decoder, library_of())
    decoder.pack(library_of(), 1)
    kept, num_kept = (None, 5) if keep is None else (jnp.array(keep, jnp.int32), 2)

    @jax.jit
    def hidden(decoder: Decoder, ids: jax.Array, count: jax.Array | None = None) -> jax.Array:
        dense = dense_attention(model())

        def attend(layer: Any, q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> Any:
            # The weights of later tokens are zero, but those of padding may be NaN, which an engine does not read.
            # Sums over other numbers of keys have other bits, so there are always 12.
            wide = [
                jnp.pad(x, ((0, 12 - len(x)), (0, 0), (0, 0))) for x in (q, k, jnp.nan_to_num(v))
            ]
            out, cache = dense(layer, *wide, *rest)
            return out[: len(q)], cache

        at = jnp.arange(len(ids))
        return decoder.run_layers(ids, at, AttentionOnly(attend), 0, kept, num_tokens=count)[0]

    ids = jnp.asarray(IDS[:5])
    wanted = np.asarray(hidden(decoder, ids))[:num_kept]
    for count in (None, jnp.int32(5)):
        found = hidden(decoder, jnp.pad(ids, (0, 7), constant_values=9), count)
        np.testing.assert_array_equal(np.asarray(found)[:num_kept], wanted)


@needs_library
@pytest.mark.parametrize("devices", [slow(1), 2])
def test_values_have_the_announced_shapes(devices: int) -> None:
    """Programs are compiled from shapes, while the values are read."""
    values, announced = (
        nnx.state(random("float32", devices, is_packed=True)),
        shapes(devices, library_of()),
    )
    assert jax.tree.structure(values) == jax.tree.structure(announced)
    for value, shape in zip(jax.tree.leaves(values), jax.tree.leaves(announced), strict=True):
        assert (value.shape, value.dtype) == (shape.shape, shape.dtype)
        assert value.sharding.is_equivalent_to(shape.sharding, value.ndim)


@needs_library
def test_new_values_take_the_form_of_the_old_ones() -> None:
    plain = random_of(model(), "float32", 2)
    read, held = (
        flat_parameters(nnx.state(each)) for each in (plain, random("float32", 2, is_packed=True))
    )
    for keys, variable in nnx.to_flat_state(shapes(2, library_of())):
        value = read[path_of(keys)]
        shape = plain_shape(variable)
        assert (shape.shape, shape.dtype) == (value.shape, value.dtype)
        assert shape.sharding.is_equivalent_to(value.sharding, value.ndim)
        np.testing.assert_array_equal(held_values(variable, value), held[path_of(keys)])
        counter = CompileCounter()
        packed = values_of_host(variable, value)
        counter.close()
        assert counter.count == 0, "weights are replaced while the engine serves"
        assert packed.sharding.is_equivalent_to(variable.get_value().sharding, packed.ndim)
        np.testing.assert_array_equal(packed, held[path_of(keys)])


def test_shapes_without_a_packed_form_stay_plain() -> None:
    """Blocks of 32 columns for each of two devices: the width of 64 has one. With blocks of 64 some have none."""
    kernels = {
        path: each for path, each in flat_parameters(shapes(2)).items() if path.endswith("kernel")
    }
    assert {each.shape[2:] for each in kernels.values()} == {(64, 32), (256, 32)}, (
        "stacks of all layers"
    )
    broad = {
        path: each for path, each in flat_parameters(shapes(2, WIDE._replace(width=64))).items()
    }
    assert broad["blocks.0.attention.query.kernel"].shape == (64, 64), "each device has 32 columns"
    assert broad["blocks.0.attention.out.kernel"].shape == (1, 64, 64)
    assert broad["blocks.0.mlp.up.kernel"].shape == (4, 64, 64)
