"""`scripts/convert_checkpoint.py` writes the same model as an Orbax checkpoint."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder
from orca_jax.model.parameters import flat_parameters
from scripts.convert_checkpoint import main
from tests.model.reference import REFERENCE, copy_of, mesh_of

SOURCE = REFERENCE / "gpt2-untied-sharded"


def test_the_same_model_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "models" / "own"
    assert main([str(SOURCE), str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}; try: python -m orca_jax.serve --model {out}\n"
    assert {path.name for path in out.iterdir()} == {"config.json", "generation_config.json", "params"}
    assert read_model_config(out) == read_model_config(SOURCE)
    ours, theirs = (
        flat_parameters(nnx.state(load_decoder(each, dtype="float32", mesh=mesh_of(1)))) for each in (out, SOURCE)
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(theirs[name]), err_msg=name)
    assert main([str(SOURCE), str(out)]) == 2, "it is not overwritten"


def test_lists_of_shards_are_not_copied(tmp_path: Path) -> None:
    """They describe files that the destination does not have."""
    source = Path(shutil.copytree(SOURCE, tmp_path / "source"))
    for name in ("pytorch_model.bin.index.json", "model.fp16.safetensors.index.json"):
        (source / name).write_text("{}")
    assert main([str(source), str(tmp_path / "out")]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "generation_config.json", "params"}


def test_a_tied_model_with_a_head_of_its_own_is_untied(tmp_path: Path) -> None:
    source = copy_of("gpt2-25-heads", tmp_path)
    tensors = load_file(source / "model.safetensors")
    head = 2 * tensors["transformer.wte.weight"]
    save_file({**tensors, "lm_head.weight": head}, source / "model.safetensors")
    assert main([str(source), str(tmp_path / "out")]) == 0
    decoder = load_decoder(tmp_path / "out", dtype="float32", mesh=mesh_of(1))
    assert decoder.head is not None
    np.testing.assert_array_equal(np.asarray(decoder.head.table.get_value())[: len(head)], head)


def test_another_type(tmp_path: Path) -> None:
    assert main([str(SOURCE), str(tmp_path), "--dtype", "bfloat16"]) == 0
    rounded = load_decoder(tmp_path, dtype="float32", mesh=mesh_of(1)).embedding.table.get_value()
    exact = load_decoder(SOURCE, dtype="float32", mesh=mesh_of(1)).embedding.table.get_value()
    assert 0 < float(abs(rounded - exact).max()) < 0.01


def test_a_directory_without_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "config.json is missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
