"""Malicious model directories: each is rejected with the name of the file, or harmless, and quickly."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from orca_jax.model.describe import read_model_config
from orca_jax.model.load import load_decoder, tensor_mesh
from orca_jax.text.generation_config import read_generation_defaults
from orca_jax.text.template import load_chat_template
from orca_jax.text.tokenizer import load_tokenizer
from orca_jax.values.errors import CheckpointError, ConfigError

CONFIG = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": 4,
    "n_head": 1,
    "vocab_size": 8,
    "n_positions": 8,
    "eos_token_id": 0,
}
TOKENIZER = {
    "version": "1.0",
    "decoder": {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    },
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SECONDS = 60  # each case takes a few seconds; without limits it would take minutes or never end

pytestmark = pytest.mark.timeout(SECONDS)


def write(directory: Path, name: str, content: object) -> None:
    data = (
        content
        if isinstance(content, bytes)
        else (content if isinstance(content, str) else json.dumps(content)).encode()
    )
    (directory / name).write_bytes(data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A valid directory, except for its weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    write(directory, "config.json", CONFIG)
    write(directory, "tokenizer.json", TOKENIZER)
    write(directory, "tokenizer_config.json", {"eos_token": "b"})
    return directory


def load_weights(directory: Path) -> None:
    load_decoder(directory, dtype="float32", mesh=tensor_mesh(jax.devices()[:1]))


def load_template(directory: Path) -> None:
    template = load_chat_template(str(directory), None)
    if template is not None:
        template.close()


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": read_model_config,
    "generation_config.json": lambda directory: read_generation_defaults(str(directory), "auto"),
    "tokenizer.json": lambda directory: load_tokenizer(str(directory)),
    "tokenizer_config.json": lambda directory: load_tokenizer(str(directory)),
    "special_tokens_map.json": load_template,
    "chat_template.jinja": load_template,
    INDEX: load_weights,
}
BROKEN: dict[str, object] = {
    "deep lists": "[" * 200_000,
    "deep objects": '{"a":' * 200_000,
    "no text": b"\xff\xfe\x00",
    "not closed": '{"a": ',
    "long number": '{"model_type": ' + "9" * 100_000 + "}",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("name", [name for name in READERS if name.endswith(".json")])
def test_broken_json(model: Path, name: str, content: object) -> None:
    write(model, name, content)
    with pytest.raises(ConfigError) as caught:
        READERS[name](model)
    assert name in caught.value.message and len(caught.value.message) < 1000


@pytest.mark.parametrize("name", [name for name in READERS if name != INDEX])
def test_large_files(model: Path, name: str) -> None:
    with (model / name).open("wb") as file:
        file.truncate(2**34)  # 16 GiB without disk space
    with pytest.raises(ConfigError, match=r"has more than \d+ bytes") as caught:
        READERS[name](model)
    assert name in caught.value.message


@pytest.mark.parametrize("name", [*READERS, SINGLE])
def test_pipes_do_not_block(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    try:
        READERS.get(name, load_weights)(model)
    except ConfigError as error:
        assert error.param in ("model", "tokenizer", "chat_template", "generation_config")
    else:
        assert name == "tokenizer_config.json", "only an optional file can be ignored"


def test_a_pipe_among_the_weights_does_not_block(model: Path) -> None:
    os.mkfifo(model / "part.safetensors")
    write(model, INDEX, {"weight_map": {"wte.weight": "part.safetensors"}})
    with pytest.raises(CheckpointError, match=r"part\.safetensors: cannot be read"):
        load_weights(model)


@pytest.mark.parametrize(
    "outside", ["../secret.safetensors", "..", "{absolute}", "a/../../secret.safetensors", ""]
)
def test_an_index_does_not_lead_out_of_the_directory(model: Path, outside: str) -> None:
    save_file({"wte.weight": np.zeros((8, 4), np.float32)}, model.parent / "secret.safetensors")
    name = outside.format(absolute=model.parent / "secret.safetensors")
    write(model, INDEX, {"weight_map": {"wte.weight": name}})
    with pytest.raises(CheckpointError) as caught:
        load_weights(model)
    assert all(
        "is not a plain file name" in problem or "cannot be read" in problem
        for problem in caught.value.problems
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 16,
        (2**63).to_bytes(8, "little") + b"{}",
        b"\x80\x04\x95",
        b"PK\x03\x04" + b"\0" * 64,
    ],
)
def test_weights_that_are_none(model: Path, content: bytes) -> None:
    write(model, SINGLE, content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        load_weights(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickles_are_not_opened(model: Path, tmp_path: Path, name: str) -> None:
    trace = tmp_path / "ran"
    write(model, name, f"cos\nsystem\n(S'touch {trace}'\ntR.".encode())
    with pytest.raises(ConfigError, match="may run code"):
        load_weights(model)
    write(model, INDEX, {"weight_map": {"wte.weight": name}})
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(model)
    assert not trace.exists()


def test_tensors_of_other_shapes_and_types(model: Path) -> None:
    save_file(
        {"wte.weight": np.zeros((9, 4), np.float32), "wpe.weight": np.zeros((8, 4), np.int64)},
        model / SINGLE,
    )
    with pytest.raises(CheckpointError) as caught:
        load_weights(model)
    told = "\n".join(caught.value.problems)
    assert (
        "wte.weight: shape [9, 4], the model needs [8, 4]" in told
        and "wpe.weight: type I64" in told
    )


HUGE: list[dict[str, Any]] = [
    {"n_layer": 10**9},
    {"n_layer": 2**40},
    {"n_embd": 2**70, "n_head": 1},
    {"vocab_size": 10**30},
]


@pytest.mark.parametrize("change", HUGE, ids=str)
def test_sizes_that_no_machine_has(model: Path, change: dict[str, Any]) -> None:
    write(model, "config.json", {**CONFIG, **change})
    save_file({"wte.weight": np.zeros((8, 4), np.float32)}, model / SINGLE)
    with pytest.raises(ConfigError) as caught:
        load_weights(model)
    assert next(iter(change)) in caught.value.message or "layers" in caught.value.message


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("tokens", [8, 2**40, [0, 9], [-1], True, "0", {"0": 1}])
def test_end_tokens_outside_the_vocabulary(model: Path, name: str, tokens: object) -> None:
    write(model, name, {**(CONFIG if name == "config.json" else {}), "eos_token_id": tokens})
    with pytest.raises(ConfigError) as caught:
        read_model_config(model)
    assert caught.value.param == "eos_token_id"


TOKENIZERS: dict[str, object] = {
    "another thing": {"model_type": "gpt2"},
    "a list": [],
    "a panic of the library": {
        **TOKENIZER,
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    },
    "a wrong expression": {
        **TOKENIZER,
        "normalizer": {"type": "Replace", "pattern": {"Regex": "(("}, "content": ""},
    },
    "a merge of nothing": {
        **TOKENIZER,
        "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]},
    },
    "weights": b"\x80\x04\x95",
}


@pytest.mark.parametrize("content", TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_invalid_tokenizers(
    model: Path, content: object, capfd: pytest.CaptureFixture[str]
) -> None:
    write(model, "tokenizer.json", content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json (is not |must hold |cannot be read)"):
        load_tokenizer(str(model))
    capfd.readouterr()  # the library writes its panics to standard error


def test_a_tokenizer_with_huge_ids_loads_soon(model: Path) -> None:
    huge = {
        **TOKENIZER,
        "model": {"type": "BPE", "vocab": {"a": 4_000_000_000, "b": 1}, "merges": []},
    }
    write(model, "tokenizer.json", huge)
    tokenizer = load_tokenizer(str(model))
    assert tokenizer.encode("ab") == [4_000_000_000, 1]
    assert tokenizer.decode([4_000_000_000, 1, 7]) == "ab"


def test_special_tokens_that_are_none(model: Path) -> None:
    write(
        model,
        "tokenizer_config.json",
        {"eos_token": 7, "bos_token": ["b"], "pad_token": {"content": {}}},
    )
    tokenizer = load_tokenizer(str(model))
    assert (tokenizer.eos_id, tokenizer.bos_id) == (None, None)
    write(model, "chat_template.jinja", "{{ eos_token is defined }}{{ bos_token is defined }}")
    template = load_chat_template(str(model), None)
    assert template is not None
    with template:
        assert template.render([]) == "FalseFalse"


@pytest.mark.parametrize(
    "value",
    [
        7,
        {},
        [7],
        [{"name": "default"}],
        [{"template": 3, "name": "default"}],
        [{"name": "rag", "template": "x"}],
        "x" * 2**21,
    ],
)
def test_chat_templates_that_are_none(model: Path, value: object) -> None:
    write(model, "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(ConfigError, match="chat_template") as caught:
        load_chat_template(str(model), None)
    assert caught.value.param == "chat_template" and "tokenizer_config.json" in caught.value.message


def test_links_are_followed_to_files_and_nothing_else(model: Path) -> None:
    """Links to files are allowed, since model caches use them."""
    elsewhere = model.parent / "blob"
    elsewhere.write_text("{{ messages | length }}", encoding="utf-8")
    (model / "chat_template.jinja").symlink_to(elsewhere)
    load_template(model)
    (model / "generation_config.json").symlink_to(model.parent)
    with pytest.raises(ConfigError, match="is not a file"):
        read_generation_defaults(str(model), "auto")
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("config.json")  # an endless loop
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        read_model_config(model)
