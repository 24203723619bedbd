"""Models of the Hub, from a server of this machine: downloads, the cache, and each way to fail."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download

from orca_jax.assembly.engine import build_engine
from orca_jax.assembly.support import check_settings
from orca_jax.helpers.bundled import directory_of, model_directory, pinned, with_commit
from orca_jax.helpers.hub import HubModel, download, is_hub_name
from orca_jax.serve.openai.model import check_texts, downloaded
from orca_jax.server_config import ServerConfig
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import ConfigError
from tests.hub.fake_hub import COMMIT, NAME, FakeHub, running
from tests.project.quickstart import small_model

PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = json.dumps({"weight_map": {"a": PARTS[0], "b": PARTS[1]}}).encode()
FILES = {
    "config.json": b'{"model_type": "gpt2"}',
    "tokenizer.json": b"{}",
    "generation_config.json": b"{ }",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": INDEX,
    PARTS[0]: b"0" * 3000,
    PARTS[1]: b"1" * 3000,
    "unlisted.safetensors": b"0",
    "pytorch_model.bin": b"pickle",
    "consolidated.00.pth": b"pickle",
    "modeling_evil.py": b"raise SystemExit",
    "original/config.json": b"{}",
    "README.md": b"text",
}
WANTED = {
    name
    for name in FILES
    if name.startswith(("config", "tokenizer", "generation", "chat", "model-", "model."))
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The server, with a cache of its own for each test."""
    with running(FakeHub(FILES)) as found:
        connect(monkeypatch, found.url, tmp_path / "cache")
        yield found


def connect(
    monkeypatch: pytest.MonkeyPatch, url: str, cache: Path, *, offline: bool = False
) -> None:
    """The library reads its variables when it is imported, so its constants are set."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)


def refusal(name: str = NAME, **settings: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        pinned(EngineConfig(name, progress=False, **settings))  # type: ignore[arg-type]
    assert "\n" not in caught.value.message
    return caught.value


def test_a_fresh_download_has_only_what_is_read(hub: FakeHub) -> None:
    folder = download(HubModel(NAME))
    found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*")}
    assert set(found) == WANTED and found == {name: FILES[name] for name in WANTED}
    assert sorted(hub.downloads) == sorted(WANTED) and folder.name == COMMIT


def test_a_single_file_is_preferred_to_parts(hub: FakeHub) -> None:
    hub.files = {**FILES, "model.safetensors": b"0" * 100}
    folder = download(HubModel(NAME))
    assert {path.name for path in folder.glob("*.safetensors")} == {"model.safetensors"}


def test_settings_alone(hub: FakeHub) -> None:
    assert not list(Path(model_directory(NAME, needs_weights=False)).glob("*.safetensors"))
    folder = pinned(EngineConfig("demo", tokenizer=NAME)).tokenizer
    assert folder is not None and (Path(folder) / "tokenizer.json").is_file()
    assert not set(PARTS) & set(hub.downloads)
    assert pinned(EngineConfig(NAME, load_format="dummy")).revision == COMMIT
    assert not set(PARTS) & set(hub.downloads)


def test_a_second_start_asks_for_the_commit_alone_and_a_pinned_one_for_nothing(
    hub: FakeHub,
) -> None:
    config = pinned(EngineConfig(NAME, progress=False))
    assert config.model == NAME and config.revision == COMMIT
    hub.requests.clear()
    assert pinned(config) == config
    assert Path(model_directory(NAME, config.revision)).is_dir() and not hub.requests
    assert pinned(EngineConfig(NAME, progress=False)) == config
    assert hub.requests == [f"API /api/models/{NAME}/revision/main"]


def test_processes_with_a_pinned_model_ignore_a_newer_commit(hub: FakeHub) -> None:
    config = pinned(EngineConfig(NAME, progress=False))
    hub.commits["main"] = "2" * 40
    assert Path(model_directory(NAME, config.revision)).name == COMMIT


def test_a_lost_connection_is_resumed_within_the_file(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    hub.cuts[PARTS[1]] = 1
    folder = download(HubModel(NAME))
    assert (folder / PARTS[1]).read_bytes() == FILES[PARTS[1]]
    assert hub.ranges == ["bytes=1500-"]


def test_an_interrupted_download_is_completed_at_the_next_start(hub: FakeHub) -> None:
    hub.lost.add(PARTS[1])
    error = refusal()
    assert (
        error.param == "model" and f"the download of {NAME} from {hub.url} failed" in error.message
    )
    assert "start again: complete files are kept" in error.message
    hub.lost.clear()
    hub.requests.clear()
    folder = download(HubModel(NAME))
    assert hub.downloads == [PARTS[1]] and (folder / PARTS[1]).read_bytes() == FILES[PARTS[1]]


def test_offline_with_a_cache(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = download(HubModel(NAME))
    hub.requests.clear()
    connect(monkeypatch, hub.url, tmp_path / "cache", offline=True)
    assert pinned(EngineConfig(NAME)).revision == COMMIT and not hub.requests
    (folder / PARTS[0]).unlink()
    assert "it is not complete in the cache" in refusal().message
    (folder / "config.json").unlink()
    assert "start once without HF_HUB_OFFLINE" in refusal().message


def test_offline_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, "http://127.0.0.1:1", tmp_path, offline=True)
    error = refusal()
    assert (
        f"{NAME} is not a directory, it is not complete in the cache {tmp_path}, and HF_HUB_OFFLINE is set"
        in error.message
    )


def test_an_endpoint_that_cannot_be_reached(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download(HubModel(NAME))
    connect(monkeypatch, "http://127.0.0.1:1", tmp_path / "cache")
    assert pinned(EngineConfig(NAME)).revision == COMMIT  # of the cache
    connect(monkeypatch, "http://127.0.0.1:1", tmp_path / "empty")
    error = refusal()
    assert (
        "http://127.0.0.1:1 cannot be reached" in error.message and "HF_ENDPOINT" in error.message
    )


def test_a_missing_model(hub: FakeHub) -> None:
    error = refusal("some-org/no-model")
    assert (
        error.param == "model"
        and f"is neither a directory nor a model at {hub.url}" in error.message
    )
    assert refusal("demo", tokenizer="some-org/no-model").param == "tokenizer"


def test_a_gated_model(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.is_gated = True
    error = refusal()
    assert f"is gated: accept its licence at {hub.url}/{NAME}, then set HF_TOKEN" in error.message
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert download(HubModel(NAME)).is_dir()


def test_a_wrong_revision(hub: FakeHub) -> None:
    error = refusal(revision="v9")
    assert error.param == "revision" and "has no revision 'v9'" in error.message


def test_a_tag_in_a_folder_of_the_user(hub: FakeHub, tmp_path: Path) -> None:
    hub.commits["v1"] = COMMIT
    config = pinned(
        EngineConfig(NAME, revision="v1", download_dir=str(tmp_path / "mine"), progress=False)
    )
    assert config.revision == COMMIT
    assert (tmp_path / "mine").is_dir() and not (tmp_path / "cache").exists()
    check_settings(config)


def test_models_without_safetensors(hub: FakeHub) -> None:
    hub.files = {name: FILES[name] for name in ("config.json", "pytorch_model.bin")}
    assert "has only pickled weights (pytorch_model.bin)" in refusal().message
    hub.files = {name: FILES[name] for name in ("config.json", "README.md")}
    hub.commits["main"] = hub.commits["3" * 40] = "3" * 40
    assert "has neither model.safetensors nor" in refusal().message
    with pytest.raises(ConfigError, match="load_format orbax needs a directory"):
        check_settings(EngineConfig(NAME, load_format="orbax"))


def test_a_full_disk(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    error = refusal()
    assert "needs 0.0 GB more" in error.message and "--download-dir or HF_HOME" in error.message
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    def fill(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fill)
    assert "is full; free some space" in refusal().message


def test_a_directory_of_the_same_name_has_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(NAME)
    Path(NAME).mkdir(parents=True)
    assert not is_hub_name(NAME) and model_directory(NAME) == NAME
    assert not any(
        is_hub_name(name)
        for name in ("demo", "preset:gpt2", "/a/b", "./a", "../a", "a/b/c", "gpt2", "a/")
    )


def test_a_worker_loads_the_commit_of_the_leader(hub: FakeHub) -> None:
    """Its own branch may have moved since; a model in a directory has no commit."""
    hub.commits["main"] = hub.commits["2" * 40] = "2" * 40
    worker = EngineConfig(NAME, progress=False)
    assert Path(directory_of(with_commit(worker, COMMIT))).name == COMMIT
    assert Path(directory_of(with_commit(worker, None))).name == "2" * 40
    assert with_commit(EngineConfig("demo"), COMMIT) == EngineConfig("demo")


@pytest.mark.slow
def test_a_model_is_served_under_the_name_that_was_given(hub: FakeHub, tmp_path: Path) -> None:
    """The front end and the engine read one directory, and the second one needs no request."""
    model = small_model(tmp_path / "model")
    hub.files = {path.name: path.read_bytes() for path in model.iterdir()}
    config = downloaded(
        ServerConfig(EngineConfig(NAME, progress=False, max_num_seqs=1, num_pages=64))
    )
    check_texts(config)
    assert config.names == (NAME,)
    hub.requests.clear()
    sent = replace(config.engine, kernel_self_test=False)
    with build_engine(sent) as built:
        assert Path(built.directory).name == COMMIT and built.tokenizer.source == built.directory
    assert not hub.requests


def test_the_variables_of_the_library(hub: FakeHub, tmp_path: Path) -> None:
    code = f"from orca_jax.helpers.bundled import model_directory; print(model_directory({NAME!r}))"
    hub.is_gated = True
    variables = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": hub.token}
    environment = {**os.environ, **variables, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "home" / "hub")
    assert done.stderr == ""  # no bars in a file
