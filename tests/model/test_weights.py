"""Hugging Face directories: every possible mistake, with one error for all mistakes of a directory."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from orca_jax.model import weights
from orca_jax.model.describe import read_model_config
from orca_jax.model.files import folder
from orca_jax.model.files.folder import SafetensorsFolder
from orca_jax.model.files.opened import OpenFile
from orca_jax.model.files.safetensors import StoredTensor, read_header
from orca_jax.model.load import load_decoder, prepare_load
from orca_jax.model.transformer import Decoder
from orca_jax.model.weight_files import INDEX, SINGLE
from orca_jax.values.errors import CheckpointError, ConfigError
from tests.model.reference import REFERENCE, copy_of, logits, mesh_of

pytestmark = pytest.mark.usefixtures("quick_compiles")

GPT2, TIED = "gpt2-25-heads", "llama-25-heads"
LLAMA, MANY = "llama-12-heads-3-groups", "llama-biases-sharded"


def load(directory: Path, devices: int = 1) -> Decoder:
    return load_decoder(directory, dtype="float32", mesh=mesh_of(devices))


def problems(directory: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def assert_right(directory: Path, name: str) -> None:
    expected = np.load(REFERENCE / name / "expected.npz")
    ours, theirs = logits(load(directory), expected["ids_1"]), expected["logits_1"]
    assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()


def test_one_error_lists_all_problems(tmp_path: Path) -> None:
    directory = copy_of(GPT2, tmp_path)
    tensors = load_file(directory / SINGLE)
    del tensors["transformer.h.1.ln_1.weight"]
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"][:32]
    tensors["transformer.h.0.attn.c_attn.weight"] = np.zeros((50, 149), np.float32)
    tensors["transformer.h.0.mlp.c_fc.bias"] = tensors["transformer.h.0.mlp.c_fc.bias"].astype(
        np.int8
    )
    tensors["transformer.h.2.ln_1.weight"] = np.zeros(50, np.float32)
    save_file(tensors, directory / SINGLE)
    assert set(problems(directory)) == {
        "transformer.h.1.ln_1.weight: missing",
        "transformer.wpe.weight: shape [32, 50], the model needs [64, 50]",
        "transformer.h.0.attn.c_attn.weight: shape [50, 149], the model needs [50, 150]",
        "transformer.h.0.mlp.c_fc.bias: type I8 is not supported, only F64, F32, F16, BF16",
        "transformer.h.2.ln_1.weight: unexpected",
    }


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_prefixes_and_keys_without_weights(tmp_path: Path, prefix: str) -> None:
    directory = copy_of(GPT2, tmp_path)
    tensors = {
        prefix + key.removeprefix("transformer."): value
        for key, value in load_file(directory / SINGLE).items()
    }
    tensors[f"{prefix}h.0.attn.bias"] = np.tril(np.ones((1, 1, 64, 64), np.uint8))
    tensors[f"{prefix}h.0.attn.masked_bias"] = np.asarray(-1e4, np.float32)
    # some files repeat a tied embedding
    tensors["lm_head.weight"] = tensors[f"{prefix}wte.weight"].copy()
    save_file(tensors, directory / SINGLE)
    assert_right(directory, GPT2)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    directory = copy_of(LLAMA, tmp_path)
    tensors = load_file(directory / SINGLE)
    del tensors["lm_head.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, directory / SINGLE)
    assert problems(directory) == ("lm_head.weight: missing",)


@pytest.mark.parametrize(
    ("name", "embedding"), [(GPT2, "transformer.wte.weight"), (TIED, "model.embed_tokens.weight")]
)
def test_a_head_that_differs_from_a_tied_embedding_is_used(
    tmp_path: Path,
    name: str,
    embedding: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(weights, "_COMPARED", 1000)  # several parts
    directory = copy_of(name, tmp_path)
    tensors = load_file(directory / SINGLE)
    head = tensors[embedding].copy()
    head[-1] *= 2  # the last row, in the last part
    save_file({**tensors, "lm_head.weight": head}, directory / SINGLE)
    decoder = load(directory)
    assert not decoder.config.tied_embeddings and decoder.head is not None
    np.testing.assert_array_equal(np.asarray(decoder.head.table.get_value())[: len(head)], head)
    assert "lm_head.weight differs" in caplog.text
    for other in (head[:-1], head.astype(np.int32)):
        save_file({**tensors, "lm_head.weight": other}, directory / SINGLE)
        assert all(problem.startswith("lm_head.weight: ") for problem in problems(directory))
    # Both are compared as the type in which they are served.
    save_file(
        {**tensors, "lm_head.weight": tensors[embedding].astype(ml_dtypes.bfloat16)},
        directory / SINGLE,
    )
    config = read_model_config(directory)
    files = SafetensorsFolder(directory)
    assert weights.with_true_head(files, config, "bfloat16").tied_embeddings
    assert not weights.with_true_head(files, config, "float32").tied_embeddings


def test_headers_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The unembedding is compared before weights are read, from the same headers; a new file needs new ones."""
    directory = copy_of(TIED, tmp_path)
    read = []

    def counted(file: OpenFile, limit: int) -> tuple[dict[str, StoredTensor], int]:
        read.append(file)
        return read_header(file, limit)

    monkeypatch.setattr(folder, "read_header", counted)
    tensors = load_file(directory / SINGLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, directory / SINGLE)
    loading = prepare_load(directory, dtype="float32")
    loading.load(mesh_of(1))
    assert len(read) == 1
    save_file({**tensors, "lm_head.bias": np.zeros(3, np.float32)}, directory / SINGLE)
    with pytest.raises(CheckpointError, match="has changed since its header was read"):
        loading.load(mesh_of(1))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types_are_cast(tmp_path: Path, dtype: type) -> None:
    directory = copy_of(LLAMA, tmp_path)
    save_file(
        {key: value.astype(dtype) for key, value in load_file(directory / SINGLE).items()},
        directory / SINGLE,
    )
    stored = load_file(directory / SINGLE)["model.layers.1.mlp.up_proj.weight"]
    loaded = load(directory, devices=2).blocks.mlp.up.kernel.get_value()
    np.testing.assert_array_equal(np.asarray(loaded[1]), stored.T.astype(np.float32))


def test_a_truncated_file_is_reported(tmp_path: Path) -> None:
    directory = copy_of(LLAMA, tmp_path)
    content = (directory / SINGLE).read_bytes()
    for size in (len(content) - 1, len(content) // 2, 4, 0):
        (directory / SINGLE).write_bytes(content[:size])
        (problem,) = problems(directory)
        assert problem.startswith(f"{SINGLE}: cannot be read")


def test_broken_parts_of_many(tmp_path: Path) -> None:
    directory = copy_of(MANY, tmp_path)
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    first, second, *others = sorted(set(weight_map.values()))
    assert others, "the fixture must have three files or more"
    (directory / first).unlink()
    (directory / second).write_bytes((directory / second).read_bytes()[:-8])
    moved = next(key for key, file in weight_map.items() if file == others[0])
    tensors = load_file(directory / others[0])
    del tensors[moved]
    save_file(tensors, directory / others[0])
    told = problems(directory)
    assert [problem.split(":")[0] for problem in told] == [first, second, moved]


@pytest.mark.parametrize(
    "index", ["", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../a.safetensors"}}']
)
def test_broken_index(tmp_path: Path, index: str) -> None:
    directory = copy_of(MANY, tmp_path)
    (directory / INDEX).write_text(index)
    assert INDEX in problems(directory)[0] or "no tensors" in problems(directory)[0]


def test_pickled_weights_are_refused_unread(tmp_path: Path) -> None:
    directory = copy_of(GPT2, tmp_path)
    (directory / SINGLE).unlink()
    assert "neither" in problems(directory)[0]
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*may run code.*convert"):
        load(directory)


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_decoder(
        REFERENCE / GPT2,
        dtype="float32",
        mesh=mesh_of(1),
        progress=lambda done, total: seen.append((done, total)),
    )
    total = seen[0][1]
    assert seen == [(done, total) for done in range(1, total + 1)]


def logged(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("index", ["old shards", "missing shards", "the single file", "no JSON"])
def test_the_single_file_comes_before_an_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, index: str
) -> None:
    """As in transformers: an index left from an earlier save is not read, and the log says so."""
    directory = copy_of(GPT2, tmp_path)
    tensors = load_file(directory / SINGLE)
    if index == "old shards":
        save_file({key: value + 1 for key, value in tensors.items()}, directory / "old.safetensors")
    names = {
        "old shards": "old.safetensors",
        "missing shards": "gone.safetensors",
        "the single file": SINGLE,
    }
    weight_map = dict.fromkeys(tensors, names.get(index))
    (directory / INDEX).write_text(
        "{" if index == "no JSON" else json.dumps({"weight_map": weight_map})
    )
    with caplog.at_level("INFO"):
        assert_right(directory, GPT2)
    assert "the single file is served" in logged(caplog)


def test_a_tied_model_logs_the_choice_of_the_single_file_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The files of a model with tied embeddings are opened twice."""
    directory = copy_of(GPT2, tmp_path)
    (directory / INDEX).write_text("{}")
    with caplog.at_level("INFO"):
        assert load(directory).config.tied_embeddings
    assert logged(caplog).count("the single file is served") == 1


def test_an_index_is_read_without_a_single_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copy_of(GPT2, tmp_path)
    (directory / SINGLE).rename(directory / "all.safetensors")
    weight_map = dict.fromkeys(load_file(directory / "all.safetensors"), "all.safetensors")
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    # old formats beside it are not read
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    (directory / "model.fp16.safetensors").write_bytes(b"")  # a variant is read by its name only
    assert_right(directory, GPT2)
    assert not logged(caplog)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("model.fp16.safetensors", "rename model.fp16.safetensors to model.safetensors"),
        (
            "model.fp16.safetensors.index.json",
            "rename model.fp16.safetensors.index.json to model.safetensors.index.json",
        ),
        ("model-00001-of-00002.safetensors", f"download {INDEX} too"),
        ("model.Q4_K_M.gguf", "GGUF weights: give the path of the file"),
        ("README.md", "hf download ORG/NAME"),
    ],
)
def test_directories_without_weights_get_advice(tmp_path: Path, name: str, advice: str) -> None:
    directory = copy_of(GPT2, tmp_path)
    (directory / SINGLE).unlink()
    (directory / name).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert advice in str(caught.value)


def test_adapters_are_refused(tmp_path: Path) -> None:
    """transformers adds an adapter to the weights, so the model without it would be another one."""
    directory = copy_of(GPT2, tmp_path)
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"adapter_config\.json.*enable_lora"):
        load(directory)


class CountedMap(dict[str, str]):
    """A `weight_map` that counts the passes over it."""

    passes = 0

    def items(self) -> Any:
        CountedMap.passes += 1
        return super().items()


def test_an_index_of_many_files_is_read_in_one_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight_map = CountedMap((f"h.{n}", f"{n}.safetensors") for n in range(3000))
    (tmp_path / INDEX).write_text("{}")
    monkeypatch.setattr(folder, "json_value", lambda text: {"weight_map": weight_map})
    found = folder._read_index(tmp_path)
    assert found == {f"{n}.safetensors": {f"h.{n}"} for n in range(3000)}
    assert CountedMap.passes == 1


def test_the_size_of_an_index_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = copy_of(MANY, tmp_path)
    number = len(json.loads((directory / INDEX).read_text())["weight_map"])
    monkeypatch.setattr(folder, "MAX_TENSORS", number - 1)
    assert f"{INDEX}: it lists {number} tensors" in problems(directory)[0]
    monkeypatch.setattr(folder, "MAX_TENSORS", number)
    monkeypatch.setattr(folder, "MAX_FILES", 1)
    assert f"{INDEX}: it lists {number} tensors" in problems(directory)[0]
    with (directory / INDEX).open("wb") as file:
        file.truncate(2**34)  # without disk space
    assert problems(directory) == (f"{INDEX} has more than {folder.MAX_INDEX_BYTES} bytes",)


def test_the_headers_are_limited_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = copy_of(MANY, tmp_path)
    first, *_ = sorted(directory.glob("*.safetensors"))
    monkeypatch.setattr(
        folder, "MAX_HEADER_BYTES", int.from_bytes(first.read_bytes()[:8], "little")
    )
    told = problems(directory)
    assert first.name not in "".join(told) and all("its header has" in problem for problem in told)


def test_a_message_has_a_limit(tmp_path: Path) -> None:
    directory = copy_of(GPT2, tmp_path)
    save_file({f"{'x' * 9000}{n}": np.zeros(1, np.float32) for n in range(100)}, directory / SINGLE)
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert len(str(caught.value)) < 30_000 and "more" in str(caught.value).splitlines()[-1]
    assert len(caught.value.problems) > 100
