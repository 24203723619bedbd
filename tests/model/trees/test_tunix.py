"""Trees of Tunix serve unchanged, those written by its own `CheckpointManager` included."""

import shutil
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import pytest
from flax import nnx

from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model.load import load_decoder
from orca_jax.values.errors import ConfigError
from tests.model.orbax import refusal
from tests.model.reference import mesh_of
from tests.model.trees.layouts import (
    Tree,
    assert_equals_reference,
    model_directory,
    tunix_gemma_tree,
    tunix_tree,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")

RECORDED = Path(__file__).parents[2] / "fixtures" / "trees" / "tunix-qwen2-tied"


def save_as_tunix(directory: Path, steps: dict[int, Tree]) -> None:
    """`CheckpointManager.save` of Tunix 0.1.7: states of nnx, and the optimiser's state beside them."""
    with ocp.training.Checkpointer(directory) as checkpointer:
        for step, tree in steps.items():
            params = nnx.State(jax.tree.map(nnx.Param, tree))
            optimizer = {"step": np.array(step), "opt_state": [jax.tree.map(np.zeros_like, tree)]}
            checkpointer.save_checkpointables(
                step, {"model_params": params, "optimizer_state": optimizer}
            )


def test_a_checkpoint_by_tunix(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The fixture is by `scripts/record_tunix.py`, which calls Tunix's own saver."""
    directory = model_directory("qwen2-tied", tmp_path / "model")
    shutil.copytree(RECORDED, directory / PARAMS)
    with caplog.at_level("INFO"):
        assert_equals_reference(directory, "qwen2-tied")
    assert "parameters by the table of Tunix, from its top" in caplog.text


@pytest.mark.parametrize("name", ["llama-12-heads-3-groups", "qwen3"])
def test_steps_with_an_optimizer(name: str, tmp_path: Path) -> None:
    directory = model_directory(name, tmp_path / "model")
    tree = tunix_tree(name)
    save_as_tunix(directory / PARAMS, {1: jax.tree.map(np.zeros_like, tree), 2: tree})
    assert_equals_reference(directory, name, 2)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_trees_of_gemma(name: str, tmp_path: Path) -> None:
    directory = model_directory(name, tmp_path / "model")
    save_as_tunix(directory / PARAMS, {1: tunix_gemma_tree(name)})
    assert_equals_reference(directory, name, 2)


def test_the_rotation_of_tunix_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = model_directory("llama-rope-llama3", tmp_path / "model")
    save_as_tunix(directory / PARAMS, {1: tunix_tree("llama-rope-llama3")})
    assert_equals_reference(directory, "llama-rope-llama3")
    assert (
        "Tunix rotates llama with a rope_theta of 1000000, and config.json has 10000" in caplog.text
    )
    assert (
        "Tunix rotates llama without scaling, and config.json has the scaling llama3" in caplog.text
    )


def test_adapters_are_refused(tmp_path: Path) -> None:
    tree = tunix_tree("llama-rope-llama3")
    tree["layers"]["0"]["attn"]["q_proj"]["w_lora_a"] = np.ones((2, 2), np.float32)
    directory = model_directory("llama-rope-llama3", tmp_path / "model")
    save_as_tunix(directory / PARAMS, {1: tree})
    (problem,) = refusal(directory).problems
    assert problem.startswith("layers/0/attn/q_proj/w_lora_a") and problem.endswith(
        ": unexpected; merge the adapter into the weights before saving"
    )


def test_families_without_a_table(tmp_path: Path) -> None:
    directory = model_directory("olmo2", tmp_path / "model")
    save_as_tunix(directory / PARAMS, {1: tunix_tree("llama-rope-llama3")})
    with pytest.raises(
        ConfigError,
        match=r"trees of Tunix are read for the families llama, qwen2, qwen3, gemma.*, not for olmo",
    ):
        load_decoder(directory, dtype="float32", mesh=mesh_of(1))
