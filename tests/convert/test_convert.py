"""`orca-jax convert` writes the same model as an Orbax checkpoint."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from orca_jax.assembly.support import quantised
from orca_jax.cli.main import main as command
from orca_jax.llm import LLM
from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder
from orca_jax.model.parameters import flat_parameters
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import CheckpointError
from orca_jax.values.request import SamplingParams
from tests.cli.imports import imported_by
from tests.model.reference import REFERENCE, copy_of, mesh_of

SOURCE = REFERENCE / "gpt2-untied-sharded"
WRITTEN = {"config.json", "generation_config.json", "params", "params.sha256"}


def convert(source: Path | str, output: Path | str, *flags: str) -> int:
    return command(["convert", "--model", str(source), "--output", str(output), *flags])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_same_model_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "models" / "own"
    assert convert(SOURCE, out) == 0
    assert capsys.readouterr().out == f"wrote {out}; try: python -m orca_jax serve --model {out}\n"
    assert names(out) == WRITTEN and names(out.parent) == {"own"}
    assert (out / "config.json").read_bytes() == (SOURCE / "config.json").read_bytes()
    assert read_model_config(out) == read_model_config(SOURCE)
    ours, theirs = (
        flat_parameters(nnx.state(load_decoder(each, dtype="float32", mesh=mesh_of(1))))
        for each in (out, SOURCE)
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(theirs[name]), err_msg=name)


def test_a_flipped_bit_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    """Orbax reads most flipped bits of values as other values."""
    assert convert(SOURCE, tmp_path / "out") == 0
    files = [path for path in sorted((tmp_path / "out" / "params").rglob("*")) if path.is_file()]
    assert len(files) > 4
    for path in files:
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 8]) + content[middle + 1 :])
        with pytest.raises(CheckpointError) as caught:
            load_decoder(tmp_path / "out", dtype="float32", mesh=mesh_of(1))
        name = path.relative_to(tmp_path / "out")
        assert caught.value.problems == (f"{name}: has other bytes than those of params.sha256",)
        path.write_bytes(content)
    load_decoder(tmp_path / "out", dtype="float32", mesh=mesh_of(1))


def test_only_texts_about_the_written_model_are_copied(tmp_path: Path) -> None:
    """Lists of shards and a mapping describe files that the output does not have."""
    source = Path(shutil.copytree(SOURCE, tmp_path / "source"))
    for name in (
        "pytorch_model.bin.index.json",
        "model.fp16.safetensors.index.json",
        "LICENSE",
        "notes.md",
    ):
        (source / name).write_text("{}")
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "tokenizer.json").write_text("{}")
    (texts / "config.json").write_text("{}")
    assert convert(source, tmp_path / "out", "--tokenizer", str(texts)) == 0
    assert names(tmp_path / "out") == WRITTEN | {"LICENSE", "tokenizer.json"}
    assert read_model_config(tmp_path / "out") == read_model_config(SOURCE)


def test_a_tied_model_with_a_head_of_its_own_is_untied(tmp_path: Path) -> None:
    source = copy_of("gpt2-25-heads", tmp_path)
    tensors = load_file(source / "model.safetensors")
    head = 2 * tensors["transformer.wte.weight"]
    save_file({**tensors, "lm_head.weight": head}, source / "model.safetensors")
    assert convert(source, tmp_path / "out") == 0
    decoder = load_decoder(tmp_path / "out", dtype="float32", mesh=mesh_of(1))
    assert decoder.head is not None
    np.testing.assert_array_equal(np.asarray(decoder.head.table.get_value())[: len(head)], head)


def test_another_type(tmp_path: Path) -> None:
    assert convert(SOURCE, tmp_path, "--dtype", "bfloat16") == 0, (
        "an empty directory is no obstacle"
    )
    rounded = load_decoder(tmp_path, dtype="float32", mesh=mesh_of(1)).embedding.table.get_value()
    exact = load_decoder(SOURCE, dtype="float32", mesh=mesh_of(1)).embedding.table.get_value()
    assert 0 < float(abs(rounded - exact).max()) < 0.01


def model_directory(folder: Path) -> Path:
    """A directory that `--force` may replace."""
    folder.mkdir()
    (folder / "config.json").write_text("another model")
    (folder / "notes.md").write_text("")
    return folder


def test_nothing_is_replaced_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = model_directory(tmp_path / "out")
    assert convert(SOURCE, out) == 2
    expected = f"error: --output: {out} already exists; choose another directory, or replace it with --force\n"
    assert capsys.readouterr().err == expected
    assert (out / "config.json").read_text() == "another model" and names(tmp_path) == {"out"}
    assert convert(SOURCE, out, "--force") == 0
    assert names(out) == WRITTEN and names(tmp_path) == {"out"}


def test_force_replaces_a_model_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.md").write_text("")
    assert convert(SOURCE, tmp_path, "--force") == 2
    assert "is not a model directory, and --force replaces nothing else" in capsys.readouterr().err
    source = Path(shutil.copytree(SOURCE, tmp_path / "models" / "source"))
    for place in (source, source.parent):
        (place / "config.json").touch()
        assert convert(source, place, "--force") == 2
        assert "holds the model to read; choose another directory" in capsys.readouterr().err
    assert convert(SOURCE, tmp_path / "notes.md", "--force") == 2
    assert "notes.md is not a directory" in capsys.readouterr().err


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    model_directory(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    assert convert(SOURCE, tmp_path / "link", "--force") == 0
    assert (tmp_path / "link").is_symlink() and names(tmp_path / "real") == WRITTEN


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "f"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("place", ["save_decoder", "_replace"])
def test_a_failure_leaves_the_old_state(
    place: str,
    error: BaseException,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*args: object) -> None:
        raise error

    out = model_directory(tmp_path / "out")
    monkeypatch.setattr(f"orca_jax.tools.convert.write.{place}", fail)
    assert convert(SOURCE, out, "--force") == (1 if isinstance(error, OSError) else 130)
    if isinstance(error, OSError):
        assert (
            "error: f: No space left on device; free some space on this disk"
            in capsys.readouterr().err
        )
    assert names(tmp_path) == {"out"} and (out / "config.json").read_text() == "another model"


def test_a_failed_exchange_moves_the_old_model_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = model_directory(tmp_path / "out")
    rename = Path.rename

    def fail_once(self: Path, target: Path) -> Path:
        if self.name == ".out.part":
            raise PermissionError(1, "Operation not permitted", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    assert convert(SOURCE, out, "--force") == 1
    assert names(tmp_path) == {"out"} and (out / "config.json").read_text() == "another model"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--model", "preset:gpt2"],
            "--model: preset:gpt2 has random weights and no files; give a model directory",
        ),
        (["--model", "nowhere"], "--model: nowhere is not a directory; give a model directory"),
        (["--model", "{}"], "config.json is missing"),
        (
            ["--tokenizer", "nowhere"],
            "--tokenizer: nowhere is not a directory; give a directory with tokenizer.json",
        ),
        (["--load-format", "orbax"], "gpt2-untied-sharded"),
        (["--revision", "v1"], "--revision: revision has no effect on"),
        (["--download-dir", "{}"], "--download-dir: download_dir has no effect on"),
    ],
)
def test_wrong_sources_write_nothing(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(SOURCE, tmp_path / "out", *(flag.format(tmp_path) for flag in flags)) == 2
    assert message in capsys.readouterr().err and not os.listdir(tmp_path)


def test_the_source_is_checked_without_jax(tmp_path: Path) -> None:
    """A wrong model is refused at once."""
    found = imported_by(["convert", "--model", str(tmp_path), "--output", str(tmp_path / "out")])
    assert "orca_jax.tools.convert.source" in found and not {"jax", "numpy", "orbax"} & found


@pytest.mark.slow
def test_quantised_weights_are_those_of_quantising_while_loading(tmp_path: Path) -> None:
    source, out = REFERENCE / "qwen2-tied", tmp_path / "int8"
    assert convert(source, out, "--quantization", "int8") == 0
    kept = json.loads((out / "config.json").read_text())
    assert kept.pop("quantization_config") == {"quant_method": "orca-jax", "weights": "int8"}
    assert kept == json.loads((source / "config.json").read_text())
    config = quantised(EngineConfig(quantization="int8"), read_model_config(source))
    ours, theirs = (
        flat_parameters(
            nnx.state(load_decoder(each, dtype="float32", mesh=mesh_of(1), config=config))
        )
        for each in (out, source)
    )
    assert ours.keys() == theirs.keys() and any(value.dtype == np.int8 for value in ours.values())
    for name, value in ours.items():
        # without padding
        stored = slice(config.vocab_size) if name.startswith("embedding") else slice(None)
        np.testing.assert_array_equal(
            np.asarray(value)[stored], np.asarray(theirs[name])[stored], err_msg=name
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_same_tokens_as_quantising_while_loading(kind: str, tmp_path: Path) -> None:
    flags = ["--quantization", kind, "--dtype", "float32"]
    assert convert("demo", tmp_path / "demo", *flags) == 0
    texts = []
    for settings in ({"model": str(tmp_path / "demo")}, {"model": "demo", "quantization": kind}):
        with LLM(
            dtype="float32", max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, **settings
        ) as llm:  # type: ignore[arg-type]
            params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
            texts.append(
                [
                    output.outputs[0].token_ids
                    for output in llm.generate(["The sea", "Two and two"], params)
                ]
            )
    assert texts[0] == texts[1] and all(len(ids) == 16 for ids in texts[0])
