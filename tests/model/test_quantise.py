"""Quantised weights: their values, their products, and loading on any mesh, from plain and from quantised files."""

import dataclasses
import json
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product as product_of
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orca_jax.assembly.support import Facts, check_support, quantised
from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.kernels.expert_mlp import BACKENDS, ExpertKernels, expert_mlp
from orca_jax.kernels.matmul import Quantised, group_size, quantised_matmul, whole
from orca_jax.kernels.matmul.blocks import BLOCK
from orca_jax.model.checkpoint import save_decoder
from orca_jax.model.describe import (
    QUANT_METHOD,
    config_from_hf,
    quantization_config,
    read_model_config,
)
from orca_jax.model.leaves import fill as leaves
from orca_jax.model.load import load_decoder, random_decoder
from orca_jax.model.matrices.quantise import check_inputs, quantise, quantise_rows
from orca_jax.model.matrices.scaled import QuantisedExperts
from orca_jax.model.parameters import flat_parameters, stored_shape
from orca_jax.model.transformer import Decoder
from orca_jax.values.config import DType, EngineConfig, Quantization
from orca_jax.values.errors import CheckpointError, ConfigError
from tests.covering import covering, slow
from tests.model import eight_heads
from tests.model.orbax import CONFIG
from tests.model.reference import REFERENCE, logits, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")  # any correct program will do
KINDS: tuple[Quantization, ...] = get_args(Quantization)
MOSTLY_SLOW = [kind if kind == "int4" else slow(kind) for kind in KINDS]
LLAMA = "llama-8-heads-2-groups"
# Largest difference between a weight and its stored value, relative to the largest weight of its scale.
STEPS = {"int8": 0.5 / 127, "fp8": 1 / 16, "int4": 1 / 4}


def weight(inputs: int = 256, outputs: int = 24) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(inputs, outputs)), jnp.float32)


# one program for each shape, and not one for each operation
in_kind = jax.jit(quantise, static_argnums=1)


def numbers(stored: Quantised, kind: Quantization) -> np.ndarray:
    """The weights that the stored values stand for, by plain arithmetic."""
    values = np.asarray(stored.values).astype(np.float32)
    scale = np.asarray(stored.scale).astype(np.float32)
    if kind != "int4":
        return values * scale
    low = ((values.astype(np.int8) & 15) ^ 8) - 8
    both = np.stack([low, values.astype(np.int8) >> 4], axis=1).reshape(-1, values.shape[1])
    return both * np.repeat(scale, len(both) // len(scale), axis=0)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_close_to_the_weights(kind: Quantization) -> None:
    given = weight()
    size = group_size(256) if kind == "int4" else 256
    largest = np.abs(np.asarray(given)).reshape(-1, size, 24).max(axis=1).repeat(size, axis=0)
    difference = np.abs(numbers(in_kind(given, kind), kind) - np.asarray(given))
    assert (difference <= STEPS[kind] * largest * 1.001).all()


def test_four_bits_use_all_sixteen_values() -> None:
    stored = np.asarray(in_kind(weight(), "int4").values)
    assert set((stored >> 4).ravel().tolist()) == set(range(-8, 8))


def test_scales_of_four_bits_are_nearer_than_those_of_the_largest_numbers() -> None:
    given = weight(512)
    groups = np.asarray(given).reshape(-1, 32, 24)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1) / -8
    plain = np.clip(np.round(groups / largest), -8, 7) * largest
    found = numbers(in_kind(given, "int4"), "int4").reshape(groups.shape)
    errors = [np.square(each - groups).sum(axis=1) for each in (found, plain)]
    assert (errors[0] < 1.01 * errors[1]).all() and errors[0].sum() < 0.97 * errors[1].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zeros(kind: Quantization) -> None:
    stored = in_kind(jnp.zeros((8, 2)), kind)
    assert not numbers(stored, kind).any() and np.isfinite(np.asarray(stored.scale)).all()


@pytest.mark.parametrize(
    ("kind", "dtype"), covering(product_of(KINDS, ("float32", "bfloat16")), size=1)
)
def test_products_in_blocks_and_at_once(kind: Quantization, dtype: DType) -> None:
    """Two devices with 200 inputs each: a whole block and a rest, and groups of 16 inputs on the edge of a device."""
    given = weight(400)
    stored, x = in_kind(given, kind), jnp.asarray(np.asarray(weight(400, 5)).T)
    wanted = np.asarray(x) @ numbers(stored, kind)
    close = {"float32": 1e-5, "bfloat16": 2e-2}[dtype] * np.abs(wanted).max()
    assert BLOCK < 400 // 2 and 400 // 2 % BLOCK
    for splits in (1, 2):
        found = jax.jit(quantised_matmul, static_argnums=(2, 3, 4))(
            x, stored, kind, jnp.dtype(dtype), splits
        )
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, wanted, rtol=0, atol=close)
    np.testing.assert_allclose(
        whole.multiply(x.astype(dtype), stored, kind, 1), wanted, rtol=0, atol=close
    )


@pytest.mark.parametrize(
    ("kind", "group", "has_zero"),
    covering(
        [
            *product_of(("int8", "int4"), (400, 80, 10), (True, False)),
            *product_of(("fp8",), (400, 80, 10), (False,)),
        ],
        lambda case: (case[0], case[1], (case[0], case[2])),
        size=1,
    ),
)
def test_products_with_scales_of_groups(kind: Quantization, group: int, has_zero: bool) -> None:
    """Groups of all inputs, on the edge of two devices, and with zero points that no value has."""
    random = np.random.default_rng(group)
    entries = random.integers(-8, 8, (400, 24)).astype(np.float32)
    scale = random.uniform(0.5, 1.5, (400 // group, 24)).astype(np.float32)
    zero = random.integers(-20, 20, scale.shape).astype(np.int16) if has_zero else None
    values = jnp.asarray(entries, {"fp8": jnp.float8_e4m3fn}.get(kind, jnp.int8))
    if kind == "int4":
        values = (values[0::2] & 15) | (values[1::2] << 4)
    stored = Quantised(values, jnp.asarray(scale), None if zero is None else jnp.asarray(zero))
    assert stored.is_grouped
    shifted = entries if zero is None else entries - np.repeat(zero, group, axis=0)
    x = np.asarray(weight(400, 5)).T
    wanted = x @ (shifted * np.repeat(scale, group, axis=0))
    close = 1e-5 * np.abs(wanted).max()
    for splits in (1, 2):
        found = jax.jit(quantised_matmul, static_argnums=(2, 3, 4))(
            jnp.asarray(x), stored, kind, jnp.dtype("float32"), splits
        )
        np.testing.assert_allclose(found, wanted, rtol=0, atol=close)
    at_once = whole.multiply(jnp.asarray(x), stored, kind, 1)
    np.testing.assert_allclose(at_once, wanted, rtol=0, atol=close)


def test_an_odd_number_of_inputs_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"two inputs in a byte, and there are 3 of 6 inputs .* use int8"
    ) as caught:
        check_inputs("int4", 6, 2)
    assert caught.value.param == "quantization"
    check_inputs("int8", 6, 2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eight_heads.make_model(LLAMA, tmp_path_factory.mktemp("models") / LLAMA)


def load(directory: Path, kind: Quantization, devices: int) -> Decoder:
    config = quantised(EngineConfig(quantization=kind), read_model_config(directory))
    return load_decoder(directory, dtype="float32", mesh=mesh_of(devices), config=config)


@pytest.mark.parametrize("devices", [4, slow(2)])
@pytest.mark.parametrize("kind", MOSTLY_SLOW)
def test_tokens_do_not_depend_on_the_mesh(plain: Path, kind: Quantization, devices: int) -> None:
    """Of two key/value heads, four devices hold copies. Values are those of whole columns."""
    ids = np.random.default_rng(1).integers(0, 300, 40)
    whole = load(plain, kind, 1)
    wanted, flat = logits(whole, ids), flat_parameters(nnx.state(whole))
    unquantised = logits(load_decoder(plain, dtype="float32", mesh=mesh_of(1)), ids)
    assert 0 < np.abs(wanted - unquantised).max() < 2 * np.abs(unquantised).max()
    decoder = load(plain, kind, devices)
    found = logits(decoder, ids)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    assert (found.argmax(axis=1) == wanted.argmax(axis=1)).all()
    for path, value in flat_parameters(nnx.state(decoder)).items():
        if ".key." not in path and ".value." not in path:
            rows = stored_shape(path, value.shape, decoder.config)[0]
            np.testing.assert_array_equal(
                np.asarray(value)[:rows], np.asarray(flat[path])[:rows], err_msg=path
            )


def test_plain_weights_are_freed_while_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantised model is never in memory together with all of its plain weights."""
    matrices: list[weakref.ref[jax.Array]] = []
    alive: list[int] = []
    fill = leaves.fill

    def watched(*args: Any) -> Iterator[tuple[str, jax.Array]]:
        for path, array in fill(*args):
            alive.append(sum(matrix() is not None for matrix in matrices))
            if path.endswith((".kernel", ".gate", ".up", ".down")):
                matrices.append(weakref.ref(array))
            yield path, array
            del array

    monkeypatch.setattr(leaves, "fill", watched)
    load(REFERENCE / "qwen2_moe", "int8", 1)
    assert len(matrices) > 5 and max(alive) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_are_those_of_the_plain_model(kind: Quantization) -> None:
    config = config_from_hf(CONFIG)
    drawn = random_decoder(config, dtype="float32", mesh=mesh_of(1))
    held = random_decoder(replace(config, quantization=kind), dtype="float32", mesh=mesh_of(1))
    flat = flat_parameters(nnx.state(held))
    up = jax.jit(partial(quantise, kind=kind))(
        flat_parameters(nnx.state(drawn))["blocks.mlp.up.kernel"]
    )
    table = jax.jit(quantise_rows)(flat_parameters(nnx.state(drawn))["embedding.table"])
    for path, parts in (("blocks.mlp.up.kernel", up), ("embedding.table", table)):
        there = {name: value for name, value in parts._asdict().items() if value is not None}
        assert {f"{path}.{name}" for name in there} == {key for key in flat if path in key}
        for name, value in there.items():
            np.testing.assert_array_equal(
                np.asarray(flat[f"{path}.{name}"]), np.asarray(value), err_msg=path
            )


@pytest.mark.parametrize("kind", MOSTLY_SLOW)
def test_quantised_files_are_read_as_they_are(
    plain: Path, kind: Quantization, tmp_path: Path
) -> None:
    decoder = load(plain, kind, 1)
    save_decoder(decoder, tmp_path, "float32")
    own = {"quantization_config": quantization_config(kind)}
    (tmp_path / "config.json").write_text(
        json.dumps({**json.loads((plain / "config.json").read_text()), **own})
    )
    assert read_model_config(tmp_path).quantization == kind
    for devices in (1, 4):
        read = load_decoder(tmp_path, dtype="float32", mesh=mesh_of(devices))
        wanted = flat_parameters(nnx.state(load(plain, kind, devices)))
        for path, value in flat_parameters(nnx.state(read)).items():
            assert value.dtype == wanted[path].dtype and value.sharding == wanted[path].sharding
            rows = stored_shape(path, value.shape, read.config)[0]
            np.testing.assert_array_equal(
                np.asarray(value)[:rows], np.asarray(wanted[path])[:rows], err_msg=path
            )
    shutil.copy(plain / "config.json", tmp_path)
    with pytest.raises(
        CheckpointError, match=r"the parameters are quantised, and config\.json has no"
    ) as caught:
        load_decoder(tmp_path, dtype="float32", mesh=mesh_of(1))
    assert "orca-jax convert" in str(caught.value)


def test_files_of_another_kind_are_refused(plain: Path, tmp_path: Path) -> None:
    save_decoder(load(plain, "int8", 1), tmp_path, "float32")
    shutil.copy(plain / "config.json", tmp_path)
    with pytest.raises(
        CheckpointError, match=r"up\.kernel\.values: shape \[2, 32, 64\], the model needs \[2, 16"
    ):
        load(tmp_path, "int4", 1)
    with pytest.raises(
        CheckpointError, match=r"up\.kernel\.values: type int8 is not supported, only float8_e4m3fn"
    ):
        load(tmp_path, "fp8", 1)
    assert (tmp_path / PARAMS).is_dir()


@pytest.mark.parametrize(
    "found",
    [
        {"weights": "int7"},
        {},
        {"weights": ["int8"]},
        {"weights": "int8", "group_size": 32},
        {"weights": "int4"},  # of earlier versions, with groups of 128
    ],
    ids=str,
)
def test_unknown_kinds_in_config_json_are_refused(found: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must have weights, one of int8, int4, fp8") as caught:
        config_from_hf({**CONFIG, "quantization_config": {"quant_method": QUANT_METHOD, **found}})
    assert caught.value.param == "quantization_config"


def test_a_setting_against_the_model_is_refused() -> None:
    model = replace(config_from_hf(CONFIG), quantization="int8")
    assert (
        quantised(EngineConfig(), model)
        == quantised(EngineConfig(quantization="int8"), model)
        == model
    )
    with pytest.raises(
        ConfigError, match=r"int4 contradicts config\.json of the model, which has int8"
    ) as caught:
        quantised(EngineConfig(quantization="int4"), model)
    assert caught.value.param == "quantization"


@pytest.mark.parametrize("kind", KINDS)
def test_decoders_from_outside_cannot_be_quantised(kind: Quantization) -> None:
    model = replace(read_model_config("preset:llama-3-8b"), decoder="mine:Own")
    with pytest.raises(
        ConfigError, match="does not cover mine:Own, a decoder of your own"
    ) as caught:
        quantised(EngineConfig(quantization=kind), model)
    assert caught.value.param == "quantization"
    assert quantised(EngineConfig(), model) is model


@pytest.mark.parametrize(
    ("kind", "implementation"),
    covering(product_of(KINDS, [backend.name for backend in BACKENDS]), size=1),
)
def test_experts_in_every_form(kind: Quantization, implementation: str) -> None:
    """Against the same form with the plain matrices that the stored values stand for."""
    draw = np.random.default_rng(2)
    plain = [
        jnp.asarray(draw.normal(size=(3, *size)), jnp.float32)
        for size in ((32, 48), (32, 48), (48, 32))
    ]
    held = [in_kind(stack, kind) for stack in plain]
    each = [zip(np.asarray(stack.values), np.asarray(stack.scale), strict=True) for stack in held]
    stands_for = ExpertKernels(
        *(np.stack([numbers(Quantised(*parts), kind) for parts in stack]) for stack in each)
    )
    form = QuantisedExperts(
        held[0], ("experts", "embed", "mlp"), kind, jnp.dtype("float32"), is_stacked=False
    ).expert_form(3)
    x = jnp.asarray(draw.normal(size=(6, 32)), jnp.float32)
    chosen, weights = jnp.asarray(draw.integers(0, 3, (6, 1)), jnp.int32), jnp.ones((6, 1))
    run = partial(
        expert_mlp,
        activation=lambda gate, up: jax.nn.relu(gate) * up,
        implementation=implementation,
    )
    wanted = np.asarray(jax.jit(run)(x, chosen, weights, stands_for))
    found = jax.jit(partial(run, form=form))(x, chosen, weights, ExpertKernels(*held))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * float(np.abs(wanted).max()))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_experts_do_not_depend_on_the_mesh(kind: Quantization) -> None:
    """With a shared expert, whose width of 20 four devices divide."""
    ids = np.random.default_rng(1).integers(0, 90, 24)
    directory = REFERENCE / "qwen2_moe"
    wanted = logits(load(directory, kind, 1), ids)
    plain = logits(load_decoder(directory, dtype="float32", mesh=mesh_of(1)), ids)
    assert 0 < np.abs(wanted - plain).max() < np.abs(plain).max()
    found = logits(load(directory, kind, 4), ids)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    assert (found.argmax(axis=1) == wanted.argmax(axis=1)).all()


def test_four_bits_for_experts_need_a_single_device() -> None:
    assert load(REFERENCE / "qwen2_moe", "int4", 1).config.quantization == "int4"
    model = dataclasses.replace(read_model_config(REFERENCE / "qwen2_moe"), quantization="int4")
    with pytest.raises(
        ConfigError, match="int4 does not cover experts on several devices: use int8"
    ) as caught:
        check_support(Facts(EngineConfig(), model=model, shards=2, num_devices=2), "devices")
    assert caught.value.param == "quantization"
