"""Settings that cannot work are refused before JAX is imported, and nothing is changed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from orca_jax.assembly.engine import build_engine
from orca_jax.kernels.ragged_attention import implementations
from orca_jax.model.weight_files import INDEX, SINGLE, check_weights
from orca_jax.timeline.writer import check_trace_file
from orca_jax.values.config import AttentionName, EngineConfig
from orca_jax.values.errors import ConfigError

REFERENCE = Path(__file__).parent / "fixtures" / "reference" / "gpt2-12-heads"
PROGRAM = """
import json, sys
from orca_jax.assembly.engine import build_engine
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
for settings in json.loads(sys.argv[1]):
    try:
        build_engine(EngineConfig(**{"progress": False, **settings}))
    except ConfigError as error:
        print(json.dumps([error.param, error.message]))
print(json.dumps(sorted({"jax", "flax", "orbax"} & set(sys.modules))))
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory without weights and without a tokenizer."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_bytes((REFERENCE / "config.json").read_bytes())
    return model


def test_wrong_settings_need_no_jax(directory: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        (
            {"trace_file": str(tmp_path / "nowhere" / "trace")},
            "trace_file",
            "No such file or directory",
        ),
        ({"trace_file": str(tmp_path)}, "trace_file", "is not a regular file"),
        (
            {"attention_implementation": "magic"},
            "attention_implementation",
            "one of tpu, tpu_latents, gpu, triton",
        ),
        ({"model": str(directory)}, "tokenizer", "no tokenizer.json"),
        ({"model": str(REFERENCE), "tokenizer": str(tmp_path)}, "tokenizer", "no tokenizer.json"),
        ({"model": str(directory), "tokenizer": "byte"}, "model", f"neither {SINGLE} nor"),
        ({"model": "preset:gpt2", "load_format": "orbax"}, "load_format", "use auto or dummy"),
    ]
    before = sorted(path for path in tmp_path.rglob("*"))
    command = [sys.executable, "-c", PROGRAM, json.dumps([settings for settings, _, _ in cases])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *errors, loaded = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(errors) == len(cases)
    for (_, param, hint), (named, message) in zip(cases, errors, strict=True):
        assert named == param and hint in message
    assert loaded == []
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_names_of_attention_are_those_of_the_backends() -> None:
    assert get_args(AttentionName) == implementations()


def test_an_implementation_for_other_devices_is_refused_before_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("orca_jax.model.load.load_decoder", refuse)
    with pytest.raises(
        ConfigError, match="one of native, xla, reference on cpu devices, got 'tpu'"
    ):
        build_engine(
            EngineConfig(model="preset:gpt2-tiny", attention_implementation="tpu", progress=False)
        )


@pytest.mark.parametrize("files", [(SINGLE,), (INDEX,), ("params/_METADATA",), ("_METADATA",)])
def test_weights_of_each_kind_are_found_by_name(files: tuple[str, ...], directory: Path) -> None:
    for name in files:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).touch()
    check_weights(directory, "auto")
    other = "orbax" if files[0] in (SINGLE, INDEX) else "safetensors"
    with pytest.raises(ConfigError):
        check_weights(directory, other)  # type: ignore[arg-type]
    check_weights(directory, "dummy")


@pytest.mark.parametrize("exists", [False, True])
def test_an_unwritable_trace_file_is_refused(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace"
    if exists:
        path.write_text("an earlier run\n")
    check_trace_file(str(path))
    guarded = path if exists else tmp_path

    def may(place: str, mode: int) -> bool:
        return Path(place) != guarded

    monkeypatch.setattr(os, "access", may)
    with pytest.raises(ConfigError, match="Permission denied; give a file in a writable directory"):
        check_trace_file(str(path))
    assert path.exists() == exists
    assert not exists or path.read_text() == "an earlier run\n", (
        "it is neither created nor truncated"
    )
