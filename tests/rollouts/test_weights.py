"""New weights of a tree: the same values as by loading, on every mesh, or one error that names every problem."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orca_jax.assembly.executor import PlacedModel, arrange, place_model
from orca_jax.assembly.weights import WeightUpdater
from orca_jax.exec.executor import JaxExecutor
from orca_jax.exec.layers import flatten_module
from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model.checkpoint import save_decoder
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder
from orca_jax.model.orbax_files import Keys
from orca_jax.model.trees.memory import flat_tree, nested
from orca_jax.values.config import DType
from orca_jax.values.errors import CheckpointError
from orca_jax.values.platforms import platform_named
from tests.kernels.native.machine import library_of
from tests.model.orbax import save
from tests.model.reference import mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

FIXTURES = Path(__file__).parents[1] / "fixtures"
LLAMA = FIXTURES / "reference" / "llama-12-heads-3-groups"
ONE_HEAD = FIXTURES / "reference" / "gemma3-one-kv-head"
GPT2 = FIXTURES / "reference" / "gpt2-12-heads"
TUNIX = FIXTURES / "trees" / "tunix-qwen2-tied"


class FakeStage:
    """Keeps new weights."""

    def __init__(self) -> None:
        self.weights: dict[int, jax.Array] = {}

    def put_weight(self, index: int, value: jax.Array) -> None:
        self.weights[index] = value


class FakeExecutor:
    """One stage for each stage of a model."""

    def __init__(self, number: int) -> None:
        self.stages = [FakeStage() for _ in range(number)]


@functools.cache
def place(source: Path, dtype: DType = "float32", tensor: int = 1, stages: int = 1) -> PlacedModel:
    devices = jax.devices()[: tensor * stages]
    config = read_model_config(source)
    return place_model(
        str(source),
        config,
        dtype=dtype,
        load_format="auto",
        seed=0,
        devices=devices,
        num_stages=stages,
    )


def updated(placed: PlacedModel, tree: Any) -> list[list[jax.Array]]:
    """The flat weights of each stage after an update."""
    executor, calls = FakeExecutor(len(placed.stages)), list[int]()
    WeightUpdater(placed, cast(JaxExecutor, executor), "").prepare(tree)(lambda: calls.append(1))
    weights = [
        [stage.weights[index] for index in range(len(stage.weights))] for stage in executor.stages
    ]
    assert len(calls) == sum(map(len, weights))
    return weights


def assert_loaded(placed: PlacedModel, weights: list[list[jax.Array]]) -> None:
    """Check that weights are those of the files, in the places of the programs."""
    for stage, found in zip(placed.stages, weights, strict=True):
        decoder = placed.weights.load(
            stage.mesh,
            span=stage.shapes.span,
            arrange=lambda it: arrange(platform_named("cpu"), it),
        )
        loaded = flatten_module(decoder)[1]
        assert len(loaded) == len(found)
        for one, other in zip(loaded, found, strict=True):
            assert (one.shape, one.dtype, one.sharding) == (
                other.shape,
                other.dtype,
                other.sharding,
            )
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def tree_of(source: Path) -> dict[str, Any]:
    """The parameters of a model, unpadded, as nested dicts of NumPy."""
    return nested(flat_of(source))


@functools.cache
def flat_of(source: Path) -> dict[Keys, np.ndarray]:
    decoder = load_decoder(source, dtype="float32", mesh=mesh_of(1))
    vocab = decoder.config.vocab_size
    leaves = flat_tree(decoder)
    rows = {
        keys: vocab if keys[0] in ("embedding", "head") else len(leaf)
        for keys, leaf in leaves.items()
    }
    return {keys: np.asarray(leaf)[: rows[keys]] for keys, leaf in leaves.items()}


@pytest.mark.parametrize(
    ("source", "tensor", "stages"),
    [
        (LLAMA, 2, 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((LLAMA, 1, 1), (ONE_HEAD, 2, 1))
        ),
    ],
)
def test_a_tree_becomes_the_weights_of_the_files(source: Path, tensor: int, stages: int) -> None:
    """With copies of the key/value head on two devices, and a vocabulary padded to whole blocks."""
    placed = place(source, tensor=tensor, stages=stages)
    assert_loaded(placed, updated(placed, tree_of(source)))


def test_packed_matrices_are_replaced() -> None:
    """The values that are put in place are those of the same files, loaded and packed."""
    library, source, devices = library_of(), "preset:gpt2-tiny", jax.devices()[:2]
    options: dict[str, Any] = {"load_format": "auto", "devices": devices, "library": library}
    config = read_model_config(source)
    config = replace(config, layers=config.layers[:1])
    placed = place_model(source, config, dtype="float32", seed=5, **options)
    plain = placed.weights.load(placed.mesh)
    (found,) = updated(placed, plain)
    arrange(platform_named("cpu"), plain, library)
    plain.pack(library, len(devices))
    for one, other in zip(flatten_module(plain)[1], found, strict=True):
        assert one.shape == other.shape and one.sharding.is_equivalent_to(other.sharding, one.ndim)
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.slow
def test_trees_of_tunix_are_read_by_its_table() -> None:
    placed = place(FIXTURES / "reference" / "qwen2-tied", tensor=2)
    assert_loaded(placed, updated(placed, str(TUNIX / "3")))


@pytest.mark.slow
def test_states_modules_and_arrays_of_jax_are_trees(tmp_path: Path) -> None:
    """The caller's arrays may be donated afterwards: the new weights are copies."""
    tree = tree_of(GPT2)
    placed = place(GPT2, tensor=2)

    class Holder(nnx.Module):
        """A module with the tree of a decoder."""

        def __init__(self, node: dict[str, Any]) -> None:
            for name, inner in node.items():
                value = Holder(inner) if isinstance(inner, dict) else nnx.Param(jnp.asarray(inner))
                setattr(self, name, value)

    module = Holder(tree)
    for source in (
        module,
        nnx.state(module),
        nnx.to_pure_dict(nnx.state(module)),
        {"params": tree},
    ):
        assert_loaded(placed, updated(placed, source))
    weights = updated(placed, module)
    for leaf in jax.tree.leaves(nnx.state(module)):
        leaf.delete()
    assert_loaded(placed, weights)
    with pytest.raises(
        CheckpointError, match="was deleted; pass the tree before its arrays are donated"
    ):
        updated(placed, module)


@pytest.mark.slow
def test_types_are_cast() -> None:
    placed = place(GPT2, "bfloat16")
    tree = jax.tree.map(lambda value: value.astype(np.float64), tree_of(GPT2))
    for array in updated(placed, tree)[0]:
        assert array.dtype == jnp.bfloat16


@pytest.mark.parametrize("is_saved", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_problem_is_named_and_nothing_is_changed(is_saved: bool, tmp_path: Path) -> None:
    tree: Any = tree_of(GPT2)
    del tree["final_norm"]["bias"]
    tree["final_norm"]["scale"] = tree["final_norm"]["scale"].astype(np.int32)
    tree["blocks"]["mlp"]["up"]["kernel"] = tree["blocks"]["mlp"]["up"]["kernel"][:2]
    tree["adapter"] = {"lora_a": np.zeros(3, np.float32)}
    if is_saved:
        save(tmp_path / PARAMS, tree)
    placed, executor = place(GPT2), FakeExecutor(1)
    with pytest.raises(CheckpointError) as caught:
        WeightUpdater(placed, cast(JaxExecutor, executor), "").prepare(
            tmp_path if is_saved else tree
        )
    problems = dict(problem.split(": ", 1) for problem in caught.value.problems)
    assert problems == {
        "final_norm.bias": "missing",
        "adapter.lora_a": "unexpected; merge the adapter into the weights before saving",
        "final_norm.scale": "type int32 is not supported, only float64, float32, float16, bfloat16",
        "blocks.mlp.up.kernel": "shape [2, 48, 192], the model needs [3, 48, 192]",
    }
    assert "The weights in use are unchanged" in caught.value.message
    assert not executor.stages[0].weights


@pytest.mark.slow
def test_a_checkpoint_is_read_whole_before_any_weight_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load_decoder(GPT2, dtype="float32", mesh=mesh_of(1))
    save_decoder(decoder, tmp_path, "float32")
    placed = place(GPT2)
    assert_loaded(placed, updated(placed, tmp_path))
    assert_loaded(placed, updated(placed, str(tmp_path / PARAMS)))
    for path in (tmp_path / PARAMS / "d").iterdir():
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read"):
        updated(placed, tmp_path)
    with pytest.raises(CheckpointError, match="not an Orbax checkpoint"):
        updated(placed, tmp_path / "nowhere")


def test_leaves_without_values_are_refused() -> None:
    tree: Any = tree_of(GPT2)
    tree["final_norm"]["bias"] = jax.random.key(0)
    tree["final_norm"]["scale"] = 3.0
    placed = place(GPT2)
    with pytest.raises(CheckpointError) as caught:
        updated(placed, tree)
    assert {problem.partition(":")[0] for problem in caught.value.problems} == {
        "final_norm.scale",
        "final_norm.bias",
    }
