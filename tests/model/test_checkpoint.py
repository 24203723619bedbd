"""Orbax checkpoints load unchanged on any mesh, or one error lists all their problems."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from orca_jax.helpers.orbax_names import PARAMS
from orca_jax.model import transformer
from orca_jax.model.checkpoint import save_decoder
from orca_jax.model.load import load_decoder, prepare_load
from orca_jax.model.parameters import flat_parameters
from orca_jax.model.stages import LayerSpan
from orca_jax.model.transformer import Decoder
from orca_jax.values.errors import CheckpointError
from tests.model.reference import REFERENCE, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

NAME = "gpt2-12-heads"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    shutil.copy(REFERENCE / NAME / "config.json", directory)
    save_decoder(
        load_decoder(REFERENCE / NAME, dtype="float32", mesh=mesh_of(2)), directory, "float32"
    )
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def problems(directory: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        load_decoder(directory, dtype="float32", mesh=mesh_of(1))
    return caught.value.problems


def edit_config(directory: Path, **changes: object) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_round_trip(saved: Path, devices: int) -> None:
    ours = load_decoder(saved, dtype="float32", mesh=mesh_of(devices))
    original = load_decoder(REFERENCE / NAME, dtype="float32", mesh=mesh_of(devices))
    expected = flat_parameters(nnx.state(original))
    for path, value in flat_parameters(nnx.state(ours)).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(expected[path]), err_msg=path)
        assert value.sharding == expected[path].sharding, path


@pytest.mark.parametrize(("devices", "span"), [(1, None), (2, LayerSpan(1, 3, 3))])
def test_layers_are_read_without_a_stack_on_a_device(
    saved: Path, devices: int, span: LayerSpan | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A freed stack would leave a hole in the memory of a GPU, beside which the KV cache may not fit."""
    taken, layer_of = list[object](), transformer._layer_of
    monkeypatch.setattr(
        transformer, "_layer_of", lambda stack, index: taken.append(stack) or layer_of(stack, index)
    )
    ours, expected = (
        flat_parameters(
            nnx.state(
                prepare_load(source, dtype="float32").load(
                    mesh_of(devices), span=span, arrange=Decoder.unstack
                )
            )
        )
        for source in (saved, REFERENCE / NAME)
    )
    assert taken and not any(isinstance(each, jax.Array) for each in taken)
    assert ours.keys() == expected.keys()
    for path, value in ours.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(expected[path]), err_msg=path)
        assert value.sharding.is_equivalent_to(expected[path].sharding, value.ndim), path


def test_types_change_on_the_way(saved: Path, tmp_path: Path) -> None:
    shutil.copy(saved / "config.json", tmp_path)
    whole = load_decoder(saved, dtype="float32", mesh=mesh_of(1))
    save_decoder(whole, tmp_path, "bfloat16")
    half = load_decoder(tmp_path, dtype="float32", mesh=mesh_of(1))
    table = half.embedding.table.get_value()
    assert table.dtype == jnp.float32
    rounded = whole.embedding.table.get_value().astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(np.asarray(table), np.asarray(rounded))


def test_one_error_lists_all_mismatches(copy: Path) -> None:
    edit_config(copy, vocab_size=300, n_inner=100, tie_word_embeddings=False)
    told = problems(copy)
    assert "embedding.table: shape [211, 48], the model needs [300, 48]" in told
    assert "blocks.mlp.up.kernel: shape [3, 48, 192], the model needs [3, 48, 100]" in told
    assert "head.table: missing" in told
    assert len(told) == 5  # up's bias and down's kernel too


def test_unexpected_parameters(saved: Path, tmp_path: Path) -> None:
    untied = load_decoder(REFERENCE / "gpt2-untied-sharded", dtype="float32", mesh=mesh_of(1))
    save_decoder(untied, tmp_path, "float32")
    shutil.copy(REFERENCE / "gpt2-untied-sharded" / "config.json", tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    assert problems(tmp_path) == ("head.table: unexpected",)


def test_truncated_files(copy: Path) -> None:
    data = sorted((copy / PARAMS).rglob("d/*"), key=lambda path: path.stat().st_size)
    largest = data[-1]
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    told = problems(copy)
    assert told and all("cannot be read" in problem for problem in told)


@pytest.mark.parametrize("content", [None, b"", b"{"])
def test_unfinished_checkpoints(copy: Path, content: bytes | None) -> None:
    metadata = copy / PARAMS / "_METADATA"
    metadata.unlink() if content is None else metadata.write_bytes(content)
    assert "metadata" in problems(copy)[0].lower()
