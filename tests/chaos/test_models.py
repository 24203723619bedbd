"""Broken or malicious model directories: exit code 2, one clear line, no code run, no file read elsewhere."""

import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orca_jax.cli.main import main
from tests.project.source import ROOT
from tests.serve.running import spawn

FIXTURE = ROOT / "tests/fixtures/reference/gpt2-12-heads"
BOMB = b"cbuiltins\neval\n(S\"open('pwned', 'w')\"\ntR."  # a pickle that creates a file when loaded

Harm = Callable[[Path], object]
HARMS: dict[str, Harm] = {}


def harm(function: Harm) -> Harm:
    HARMS[function.__name__] = function
    return function


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def safetensors(
    directory: Path, header: bytes, data: bytes = b"", length: int | None = None
) -> None:
    size = len(header) if length is None else length
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", size) + header + data)


@harm
def no_config(directory: Path) -> None:
    (directory / "config.json").unlink()


@harm
def config_is_a_directory(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()


@harm
def config_never_ends(directory: Path) -> None:
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")


@harm
def config_points_at_itself(directory: Path) -> None:
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to(directory / "config.json")


@harm
def config_is_very_deep(directory: Path) -> None:
    (directory / "config.json").write_text("[" * 10**6)


@harm
def config_is_binary(directory: Path) -> None:
    (directory / "config.json").write_bytes(os.urandom(1000))


@harm
def config_is_a_list(directory: Path) -> None:
    (directory / "config.json").write_text("[]")


@harm
def config_has_a_long_number(directory: Path) -> None:
    (directory / "config.json").write_text(
        '{"model_type": "gpt2", "vocab_size": ' + "9" * 10**5 + "}"
    )


@harm
def model_type_is_unknown(directory: Path) -> None:
    edit_config(directory, model_type="../../evil", auto_map={"AutoModel": "evil.Model"})


@harm
def vocabulary_is_negative(directory: Path) -> None:
    edit_config(directory, vocab_size=-1)


@harm
def vocabulary_is_endless(directory: Path) -> None:
    edit_config(directory, vocab_size=2**62)


@harm
def layers_are_endless(directory: Path) -> None:
    edit_config(directory, n_layer=10**9)


@harm
def sizes_are_no_numbers(directory: Path) -> None:
    edit_config(directory, n_embd=float("nan"), n_head=True)


@harm
def heads_are_none(directory: Path) -> None:
    edit_config(directory, n_head=0)


@harm
def code_comes_with_it(directory: Path) -> None:
    (directory / "modeling_evil.py").write_text("open('pwned', 'w')")
    edit_config(
        directory, model_type="evil", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"}
    )


@harm
def weights_are_a_pickle(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(BOMB)


@harm
def weights_are_a_pickle_by_another_name(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(BOMB)


@harm
def header_is_endless(directory: Path) -> None:
    safetensors(directory, b"{}", length=2**62)


@harm
def header_is_deep(directory: Path) -> None:
    safetensors(directory, b'{"a":' * 10**5)


@harm
def tensors_overlap(directory: Path) -> None:
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    safetensors(directory, json.dumps({"a": tensor, "b": tensor}).encode(), b"\0" * 16)


@harm
def tensors_lie_outside(directory: Path) -> None:
    tensor = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    safetensors(directory, json.dumps({"a": tensor}).encode(), b"\0" * 16)


@harm
def weights_are_cut_off(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


@harm
def weights_are_elsewhere(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    index = {"weight_map": {"wte.weight": "../../../../../../etc/passwd"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@harm
def index_is_nonsense(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1, "b": null}}')


@harm
def weights_are_there_twice(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "params").mkdir()
    (directory / "params" / "_METADATA").write_text("{" * 1000)


@harm
def end_token_is_outside(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": 1000000000}')


@harm
def defaults_are_nonsense(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"temperature": -5, "top_p": "x"}')


@harm
def tokenizer_is_garbage(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{" * 10**5)


@harm
def tokenizer_is_missing(directory: Path) -> None:
    (directory / "tokenizer.json").unlink(missing_ok=True)


def harmed(name: str, folder: Path) -> list[str]:
    """The flags of an engine with a model that was harmed."""
    directory = folder / "model"
    shutil.copytree(FIXTURE, directory)
    HARMS[name](directory)
    flags = ["--model", str(directory), "--compile-cache", "none"]
    flags += ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "64"]
    return flags if name.startswith("tokenizer") else [*flags, "--tokenizer", "byte"]


def check(status: int, out: str, errors: str, folder: Path) -> None:
    """A refusal is one line that names a flag; nothing ran, and no other file was read."""
    assert status == 2, (status, out, errors[-2000:])
    assert "Traceback" not in errors and re.search("^error: --[a-z-]+: ", errors, re.MULTILINE), (
        errors[-2000:]
    )
    assert out == "" and len(errors) < 5000 and "root:" not in errors
    assert not list(folder.rglob("pwned")) and not (ROOT / "pwned").exists(), "it ran code"


@pytest.mark.parametrize("name", HARMS)
def test_it_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command that has its engine in this process."""
    flags = harmed(name, tmp_path)
    start = time.monotonic()
    status = main(["generate", *flags, "--max-tokens", "2", "hi"])
    assert time.monotonic() - start < 60
    check(status, *capsys.readouterr(), tmp_path)


@pytest.mark.parametrize(
    "name", ["no_config", "code_comes_with_it", "weights_are_cut_off", "tokenizer_is_garbage"]
)
def test_a_server_refuses_it(name: str, tmp_path: Path) -> None:
    process = spawn(*harmed(name, tmp_path), "--port", "0")
    try:
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    check(process.returncode, out, errors, tmp_path)
