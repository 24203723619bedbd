"""Trees of MaxText serve unchanged, scanned or not, with the rotation and the scale of queries of each family."""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder
from orca_jax.model.rope import frequencies
from orca_jax.model.trees import maxtext
from orca_jax.values.errors import CheckpointError, ConfigError
from tests.covering import slow
from tests.model.orbax import refusal, save
from tests.model.reference import REFERENCE, logits, mesh_of
from tests.model.trees.layouts import (
    Tree,
    assert_equals_reference,
    maxtext_logits,
    maxtext_tree,
    model_directory,
    save_steps,
)

pytestmark = pytest.mark.usefixtures("quick_compiles")

LLAMA, LLAMA_31 = "llama-smollm-9-heads", "llama-rope-llama3"


def directory_with(tree: object, name: str, folder: Path, **mapping: Any) -> Path:
    """A model directory with MaxText's params-only checkpoint, and mapping.json if there are options."""
    directory = model_directory(name, folder)
    save(directory / PARAMS, {"params": {"params": tree}})
    if mapping:
        (directory / "mapping.json").write_text(
            json.dumps({"table": "maxtext", "options": mapping})
        )
    return directory


@pytest.mark.parametrize(("name", "pairs"), [("llama-12-heads-3-groups", False), (LLAMA_31, True)])
def test_the_trees_of_these_tests_are_those_of_maxtext(name: str, pairs: bool) -> None:
    """MaxText's forward pass over the tree gives the logits of transformers."""
    rope = read_model_config(REFERENCE / name).rope
    tree = maxtext_tree(name, scanned=False, pairs=pairs)
    dim = tree["decoder"]["layers_0"]["self_attention"]["query"]["kernel"].shape[-1]
    expected = np.load(REFERENCE / name / "expected.npz")
    assert rope is not None
    ours = maxtext_logits(tree, name, expected["ids_2"], frequencies(rope, dim), pairs=pairs)
    assert np.abs(ours - expected["logits_2"]).max() <= 2e-5 * np.abs(expected["logits_2"]).max()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (LLAMA, {"rows": 31}),
        (LLAMA_31, {"pairs": True, "scanned": False}),
        ("qwen2-tied", {"fused_mlp": True}),
        ("qwen3", {"scanned": False}),
        ("qwen3_moe", {}),
        ("mixtral", {"scanned": False}),
        slow("qwen3_moe", {"scanned": False}),
        slow("mixtral", {}),
        slow(LLAMA, {"scanned": False}),
        slow(LLAMA, {"fused_mlp": True, "scanned": False}),
        slow("mistral-window", {}),
        slow("qwen2-tied", {"scanned": False}),
        slow("qwen3", {}),
    ],
    ids=str,
)
def test_served_parameters(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    directory = directory_with(maxtext_tree(name, **options), name, tmp_path / "model")
    assert_equals_reference(directory, name, exact=name.startswith("qwen"))


def test_on_several_devices(tmp_path: Path) -> None:
    """Each device reads its own heads, also more devices than key/value heads."""
    directory = directory_with(maxtext_tree("qwen3"), "qwen3", tmp_path / "model")
    assert_equals_reference(directory, "qwen3", 4)


@pytest.mark.slow
def test_logits_equal_transformers(tmp_path: Path) -> None:
    directory = directory_with(maxtext_tree(LLAMA_31, pairs=True), LLAMA_31, tmp_path / "model")
    decoder = load_decoder(directory, dtype="float32", mesh=mesh_of(1))
    expected = np.load(REFERENCE / LLAMA_31 / "expected.npz")
    ours, theirs = logits(decoder, expected["ids_2"]), expected["logits_2"]
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


def test_training_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`train.py` writes steps with an item "items"; optimiser state has copies of the tree."""
    name = LLAMA_31
    tree = maxtext_tree(name, pairs=True)

    def state(tree: Tree, step: int) -> Tree:
        moments = {"mu": {"params": tree}, "nu": {"params": tree}, "count": np.int32(step)}
        return {"params": {"params": tree}, "opt_state": moments, "step": np.int32(step)}

    directory = model_directory(name, tmp_path / "model")
    save_steps(
        directory / PARAMS,
        {100: state(maxtext_tree(name, pairs=False), 100), 200: state(tree, 200)},
    )
    with caplog.at_level("INFO"):
        assert_equals_reference(directory, name, exact=False)
    assert "parameters by the table of MaxText, from params/params" in caplog.text
    assert "step 200" in caplog.text


def test_options(tmp_path: Path) -> None:
    tree = maxtext_tree(LLAMA_31, scan_axis=0)
    directory = directory_with(
        tree, LLAMA_31, tmp_path / "model", param_scan_axis=0, rope_type="default"
    )
    assert_equals_reference(directory, LLAMA_31, exact=False)


@pytest.mark.parametrize("rope_type", [None, "default"])
def test_a_llama_without_scaling_may_be_another_one(
    rope_type: Literal["default"] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A config.json without the scaling of Llama 3.1 would rotate its heads in the wrong way."""
    for name in (LLAMA, LLAMA_31, "mistral-window", "qwen3"):
        caplog.clear()
        maxtext.table(
            read_model_config(REFERENCE / name), (), maxtext.MaxTextOptions(rope_type=rope_type)
        )
        assert ("config.json has no rotary scaling llama3" in caplog.text) == (
            name == LLAMA and rope_type is None
        )


def test_divided_logits_make_a_head(tmp_path: Path) -> None:
    """MaxText divides the logits of a tied embedding by the root of its width, unless told otherwise."""
    directory = directory_with(
        maxtext_tree("qwen3"), "qwen3", tmp_path / "model", normalize_embedding_logits=True
    )
    with pytest.raises(ConfigError, match="set tie_word_embeddings to false"):
        load_decoder(directory, dtype="float32", mesh=mesh_of(1))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    decoder: Any = load_decoder(directory, dtype="float32", mesh=mesh_of(1))
    head, table = decoder.head.table.get_value(), decoder.embedding.table.get_value()
    np.testing.assert_allclose(
        np.asarray(head), np.asarray(table) / np.sqrt(config["hidden_size"]), rtol=1e-6
    )


def test_problems_name_the_keys_of_maxtext(tmp_path: Path) -> None:
    tree = maxtext_tree(LLAMA_31)
    del tree["decoder"]["layers"]["mlp"]["wo"]
    tree["decoder"]["layers"]["mlp"]["wi_0"]["kernel_lora_a"] = np.ones((2, 2), np.float32)
    tree["decoder"]["layers"]["self_attention"]["key"]["kernel"] = np.ones((8, 2, 3), np.float32)
    tree["token_embedder"]["embedding"] = tree["token_embedder"]["embedding"][:-1]
    problems = refusal(directory_with(tree, LLAMA_31, tmp_path / "model")).problems
    assert "decoder/layers/mlp/wo/kernel: missing" in problems
    adapter = "decoder/layers/mlp/wi_0/kernel_lora_a: unexpected; merge the adapter into the weights before saving"
    assert adapter in problems
    assert any(
        problem.startswith("decoder/layers/self_attention/key/kernel: shape [8, 3] has no axis 2")
        for problem in problems
    )
    assert any("axis 0 of shape [96, 8] has no part 0 to 97" in problem for problem in problems), (
        problems
    )
    assert len(problems) == 4


def test_families_without_a_table(tmp_path: Path) -> None:
    directory = directory_with(maxtext_tree(LLAMA_31), "olmo2", tmp_path / "model")
    with pytest.raises(
        ConfigError, match="families llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, not for"
    ) as caught:
        load_decoder(directory, dtype="float32", mesh=mesh_of(1))
    assert not isinstance(caught.value, CheckpointError)
    assert "mapping.json (docs/own_models.md)" in str(caught.value)
