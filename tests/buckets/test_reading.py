"""Decoders from buckets equal those of a disk: each format, each process its own shards, few bytes beside them."""

import json
import shutil
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from orca_jax.helpers.buckets.names import BucketName
from orca_jax.helpers.buckets.store import Bucket
from orca_jax.helpers.bundled import model_directory
from orca_jax.helpers.orbax_names import DIGESTS, PARAMS
from orca_jax.model.checkpoint import save_decoder
from orca_jax.model.describe import read_model_config
from orca_jax.model.files import opened
from orca_jax.model.files.digests import write_digests
from orca_jax.model.load import load_decoder, prepare_load, random_decoder
from orca_jax.model.parameters import flat_parameters
from orca_jax.model.stages import LayerSpan
from orca_jax.model.transformer import Decoder
from orca_jax.tools.convert.__main__ import main as convert
from orca_jax.values.errors import CheckpointError
from tests.buckets.emulator import BUCKET, Emulator
from tests.model.reference import REFERENCE, mesh_of

SHARDED = REFERENCE / "gpt2-untied-sharded"


def loaded(source: str, devices: int = 1) -> Decoder:
    """The decoder of a directory or of a bucket."""
    return load_decoder(model_directory(source), dtype="float32", mesh=mesh_of(devices))


def assert_equal(one: Decoder, other: Decoder) -> None:
    """Compare all parameters."""
    others = flat_parameters(nnx.state(other))
    for path, value in flat_parameters(nnx.state(one)).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(others[path]), err_msg=path)


@pytest.fixture(scope="module")
def orbax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an Orbax checkpoint."""
    folder = tmp_path_factory.mktemp("orbax")
    save_decoder(loaded(str(SHARDED)), folder, "float32")
    shutil.copy(SHARDED / "config.json", folder)
    return folder


@pytest.mark.parametrize("scheme", ["gs://", "s3://", "http://"])
@pytest.mark.parametrize("devices", [1, 2])
def test_shards_of_safetensors(scheme: str, devices: int, store: Emulator) -> None:
    store.put(SHARDED, "a/b")
    place = f"{store.url}/{BUCKET}" if scheme == "http://" else f"{scheme}{BUCKET}"
    assert_equal(loaded(f"{place}/a/b", devices), loaded(str(SHARDED), devices))


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize("devices", [1, 2])
def test_an_orbax_checkpoint(scheme: str, devices: int, store: Emulator, orbax: Path) -> None:
    store.put(orbax, "a")
    assert_equal(loaded(f"{scheme}://{BUCKET}/a/", devices), loaded(str(SHARDED), devices))


def test_a_step_of_maxtext(store: Emulator, orbax: Path) -> None:
    """The configuration is two folders above the tree, and beside nothing else."""
    store.put(orbax / PARAMS, "run/0/items")
    store.write("run/config.json", (orbax / "config.json").read_bytes())
    store.write("run/0/_CHECKPOINT_METADATA", b"{}")
    for name in ("run/0/items", "run/0"):
        assert_equal(loaded(f"gs://{BUCKET}/{name}"), loaded(str(SHARDED)))


def test_arrays_in_files_of_their_own(store: Emulator, orbax: Path, tmp_path: Path) -> None:
    """Orbax without OCDBT writes a folder for each array."""
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.restore(orbax / PARAMS)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / PARAMS, args=ocp.args.PyTreeSave(tree))
    store.put(tmp_path / PARAMS, "a/params")
    store.write("a/config.json", (orbax / "config.json").read_bytes())
    assert_equal(loaded(f"s3://{BUCKET}/a"), loaded(str(SHARDED)))


def test_a_list_of_digests(store: Emulator, orbax: Path) -> None:
    """A file with another byte is named. Pieces of an object end where it ends."""
    write_digests(orbax)
    store.put(orbax, "a")
    (orbax / DIGESTS).unlink()
    assert_equal(loaded(f"gs://{BUCKET}/a"), loaded(str(SHARDED)))
    changed = max(store.objects, key=lambda key: len(store.objects[key]))
    store.write(changed, store.objects[changed][:-1] + b"?")
    name = changed.removeprefix("a/")
    with pytest.raises(
        CheckpointError, match=f"gs://{BUCKET}/a does not .*\n.*{name}: has other bytes"
    ):
        loaded(f"gs://{BUCKET}/a")


def test_pieces(store: Emulator) -> None:
    for size in (1, 3, 8, 21, 64):
        store.write("x", bytes(range(size)))
        pieces = list(Bucket(BucketName("gs", BUCKET, "")).pieces("x", 8))
        assert b"".join(pieces) == bytes(range(size)) and max(map(len, pieces)) <= 8


LARGE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with safetensors of two megabytes, in whose layers half of the bytes are rows for each of two."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "config.json").write_text(json.dumps(LARGE))
    decoder = random_decoder(read_model_config(folder), dtype="float32", mesh=mesh_of(1))
    save_decoder(decoder, folder, "float32")
    return folder


def safetensors_of(source: Path, folder: Path) -> Path:
    """The same model as safetensors."""
    words = ["--model", str(source), "--output", str(folder / "model")]
    assert convert([*words, "--output-format", "safetensors"]) == 0
    return folder / "model"


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_bytes_of_a_load(
    kind: str, devices: int, store: Emulator, large: Path, tmp_path: Path
) -> None:
    """All weights are read once, whatever the devices, and five per cent beside them at most."""
    store.put(large if kind == "orbax" else safetensors_of(large, tmp_path), "a")
    decoder = loaded(f"gs://{BUCKET}/a", devices)
    weights = 4 * sum(value.size for value in flat_parameters(nnx.state(decoder)).values())
    sent = sum(store.sent.values())
    print(sent, weights, sent / weights)
    assert sent <= 1.05 * weights
    assert sent >= 0.9 * weights  # zstandard makes random numbers a little smaller


def test_a_stage_reads_its_layers_alone(store: Emulator, large: Path, tmp_path: Path) -> None:
    """The second of two stages needs one of two layers, and with the head the other half of the rest."""
    source = safetensors_of(large, tmp_path)
    store.put(source, "a")
    loading = prepare_load(model_directory(f"s3://{BUCKET}/a"), dtype="float32")
    decoder = loading.load(mesh_of(1), span=LayerSpan(1, 2, 2))
    needed = 4 * sum(value.size for value in flat_parameters(nnx.state(decoder)).values())
    assert needed <= sum(store.sent.values()) <= 1.05 * needed


def test_tensors_of_several_requests(store: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opened, "REQUEST_BYTES", 1000)
    store.put(SHARDED, "a")
    assert_equal(loaded(f"gs://{BUCKET}/a"), loaded(str(SHARDED)))
    assert len(store.requests) > sum(map(len, store.objects.values())) / 1000
