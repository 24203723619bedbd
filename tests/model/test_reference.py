"""Logits and greedy ids equal those of transformers, for every fixture of make_reference.py and on several meshes."""

from collections.abc import Hashable
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from orca_jax.model.describe import read_model_config
from orca_jax.model.load import abstract_decoder, load_decoder
from orca_jax.model.sharding import most_shards, partition_spec
from tests.covering import covering, slow
from tests.model.reference import NAMES, REFERENCE, dense_attention, logits, mesh_of

TWO = ("gpt2-12-heads", "llama-12-heads-3-groups")
MIXED = [name for name in NAMES if len(set(read_model_config(REFERENCE / name).layers)) > 1]


def fitting() -> list[tuple[str, int]]:
    configs = {name: read_model_config(REFERENCE / name) for name in NAMES}
    return [
        (name, size)
        for name, config in configs.items()
        for size in (1, 2, 4, 6)
        if most_shards(config, size) == size
    ]


def is_slow(name: str, size: int) -> bool:
    """True for models whose shares on many devices are those of a Llama or a GPT-2, and for variants of a family."""
    if size > 1 and name.startswith("llama-rope"):  # as a Llama without them
        return True
    if name in MIXED:
        return (name, size) not in {("gemma2", 1), ("gemma3", 2)}
    if read_model_config(REFERENCE / name).experts is not None:
        return (name, size) not in (("mixtral", 1), ("qwen2_moe", 2))
    return size > 2 and not name.startswith(("gpt2", "llama", "olmo2"))


@pytest.fixture(autouse=True)
def quick_unless_whole(request: pytest.FixtureRequest) -> None:
    """Compile a GPT-2 and a Llama on one device as for users. For the others any correct program will do."""
    case = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if case.get("devices", 1) > 1 or case.get("name") not in TWO:
        request.getfixturevalue("quick_compiles")


def test_all_required_cases_exist() -> None:
    configs = {name: read_model_config(REFERENCE / name) for name in NAMES}
    assert {config.num_heads for config in configs.values()} >= {12, 25}
    assert any(config.num_heads == 3 * config.num_kv_heads for config in configs.values())
    kinds = {config.rope.kind for config in configs.values() if config.rope}
    assert kinds == {"default", "linear", "dynamic", "llama3", "yarn", "longrope"}
    assert {config.tied_embeddings for config in configs.values()} == {True, False}
    assert {size for _, size in fitting()} == {1, 2, 4, 6}


def aspects(case: tuple[str, int]) -> tuple[Hashable, ...]:
    """Each model on some devices, each family on one and on several, and every number of them."""
    name, devices = case
    return name, devices, (read_model_config(REFERENCE / name).family, devices > 1)


@pytest.mark.parametrize(
    ("name", "devices"),
    covering([case for case in fitting() if not is_slow(*case)], aspects, size=1)
    + [slow(*case) for case in fitting() if is_slow(*case)],
)
def test_logits_and_greedy_ids_equal_transformers(name: str, devices: int) -> None:
    decoder = load_decoder(REFERENCE / name, dtype="float32", mesh=mesh_of(devices))
    expected = np.load(REFERENCE / name / "expected.npz")
    for number in range(4):
        ids, theirs, greedy = (expected[f"{part}_{number}"] for part in ("ids", "logits", "greedy"))
        ours = logits(decoder, np.concatenate([ids, greedy]))
        assert np.abs(ours[: len(ids)] - theirs).max() <= 2e-5 * np.abs(theirs).max()
        # With the reference's ids as input, every next id must be the greedy one, as in generation one by one.
        assert ours.argmax(axis=1)[len(ids) - 1 : -1].tolist() == greedy.tolist()


@pytest.mark.parametrize(
    ("devices", "switched", "name"), covering(product((1, 4), (False, True), TWO), size=1)
)
def test_unstacked_layers_are_the_same_model(name: str, devices: int, switched: bool) -> None:
    decoder = load_decoder(REFERENCE / name, dtype="float32", mesh=mesh_of(devices))
    expected = np.load(REFERENCE / name / "expected.npz")
    decoder.unstack(switched=switched)
    for _, variable in nnx.to_flat_state(nnx.state(decoder)):
        value, axes = variable.get_value(), variable.get_metadata("axes")
        assert "layers" not in axes
        placed = NamedSharding(mesh_of(devices), partition_spec(axes))
        assert value.sharding.is_equivalent_to(placed, value.ndim)
    ours, theirs = logits(decoder, expected["ids_2"]), expected["logits_2"]
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


@pytest.mark.parametrize(
    ("keep", "name"),
    [
        pytest.param(*case, marks=() if case == ((0, 3, 3), TWO[1]) else pytest.mark.slow)
        for case in product((None, (5,), (0, 3, 3)), TWO)
    ],
)
def test_a_switch_between_layers_changes_no_bit(name: str, keep: tuple[int, ...] | None) -> None:
    ids = jnp.arange(8, dtype=jnp.int32)
    kept = None if keep is None else jnp.array(keep, jnp.int32)

    def hidden(*, switched: bool) -> np.ndarray:
        decoder = load_decoder(REFERENCE / name, dtype="float32", mesh=mesh_of(1))
        decoder.unstack(switched=switched)
        run = jax.jit(
            lambda decoder: decoder(ids, ids, dense_attention(decoder.config), 0, kept)[0]
        )
        return np.asarray(run(decoder))

    unrolled = hidden(switched=False)
    assert unrolled.shape[0] == (8 if keep is None else len(keep))
    np.testing.assert_array_equal(hidden(switched=True), unrolled)


@pytest.mark.parametrize("name", [slow(TWO[0]), TWO[1]])
def test_bfloat16_is_near(name: str) -> None:
    decoder = load_decoder(REFERENCE / name, dtype="bfloat16", mesh=mesh_of(2))
    expected = np.load(REFERENCE / name / "expected.npz")
    ours, theirs = logits(decoder, expected["ids_2"]), expected["logits_2"]
    error = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert 1e-4 < error < 5e-2, "with an exact result the weights would not be bfloat16"


def test_the_scale_of_embeddings_has_the_type_of_the_weights() -> None:
    """Gemma 3 of 1B multiplies by 34 in bfloat16, not by the root of 1152; transformers rounds it too."""
    config = replace(read_model_config(REFERENCE / "gemma2"), embedding_scale=1152**0.5)
    scales = {
        dtype: nnx.merge(*abstract_decoder(config, dtype, mesh_of(1))).embedding_scale
        for dtype in ("float32", "bfloat16")
    }
    assert scales == {"float32": float(np.float32(1152**0.5)), "bfloat16": 34.0}
