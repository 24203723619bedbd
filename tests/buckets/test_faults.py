"""Faults of a store: some are mended by another try, all others are errors that name the object and help."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from orca_jax.helpers.buckets import names, views
from orca_jax.helpers.buckets.views import view_of
from orca_jax.helpers.bundled import model_directory, pinned, with_commit
from orca_jax.helpers.hub import INDEX
from orca_jax.model.load import load_decoder
from orca_jax.values.config import EngineConfig
from orca_jax.values.errors import CheckpointError, ConfigError
from tests.buckets.emulator import BUCKET, SECRET, TOKEN, Emulator, Fault
from tests.buckets.test_reading import SHARDED, assert_equal, loaded, orbax
from tests.model.reference import mesh_of

__all__ = ["orbax"]
SCHEMES = ("gs", "s3")
SHARD = "a/model-00001-of-00004.safetensors"


def at_first(*faults: Fault, key: str = "") -> Callable[[str, int], Fault | None]:
    """Faults of the first requests for each object, or for one."""

    def fault(asked: str, number: int) -> Fault | None:
        return faults[number] if number < len(faults) and key in asked else None

    return fault


def always(fault: Fault, key: str) -> Callable[[str, int], Fault | None]:
    """A fault of each request for an object."""
    return lambda asked, number: fault if key in asked else None


def refusal(source: str) -> str:
    """The message of the error of a load."""
    with pytest.raises(ConfigError) as caught:
        loaded(source)
    assert TOKEN not in caught.value.message and SECRET not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("scheme", SCHEMES)
def test_broken_connections_and_failures_are_tried_again(scheme: str, store: Emulator) -> None:
    store.put(SHARDED, "a")
    store.fault = at_first("reset", 503, "cut", 429, 500)
    store.latency = 0.01
    assert_equal(loaded(f"{scheme}://{BUCKET}/a"), loaded(str(SHARDED)))


def test_broken_connections_of_arrays_are_tried_again(store: Emulator, orbax: Path) -> None:
    store.put(orbax, "a")
    store.fault = at_first("cut", 503)
    assert_equal(loaded(f"gs://{BUCKET}/a"), loaded(str(SHARDED)))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (403, r"access is refused \(HTTP 403\); check the name, and the credentials: "),
        (401, r"access is refused \(HTTP 401\)"),
        (503, r"the server failed after 6 further tries \(HTTP 503\); load again later"),
        (400, r"the server refuses the request \(HTTP 400\)"),
        ("reset", r"the connection failed after 6 further tries \(curl \d+\); check the network"),
        ("cut", r"the connection failed after 6 further tries \(curl \d+\)"),
        ("moved", "it has fewer bytes than it should have: it was cut or changed"),
        ("whole", "the server ignores ranges of bytes; use another endpoint"),
    ],
)
def test_lasting_faults_of_a_shard_name_it(
    scheme: str, fault: Fault, reason: str, store: Emulator
) -> None:
    store.put(SHARDED, "a")
    model = model_directory(f"{scheme}://{BUCKET}/a")
    store.fault = always(fault, SHARD)
    with pytest.raises(CheckpointError, match=f"{scheme}://{BUCKET}/{SHARD}: {reason}"):
        load_decoder(model, dtype="float32", mesh=mesh_of(1))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("fault", [403, 503, "reset"])
def test_lasting_faults_of_an_array_name_it(
    scheme: str, fault: Fault, store: Emulator, orbax: Path
) -> None:
    store.put(orbax, "a")
    model = model_directory(f"{scheme}://{BUCKET}/a")
    store.fault = always(fault, "/d/")
    with pytest.raises(CheckpointError) as caught:
        load_decoder(model, dtype="float32", mesh=mesh_of(1))
    message = caught.value.message
    assert f"{scheme}://{BUCKET}/a/params does not" in message and "cannot be read: " in message
    assert "a/params/d/" in message or "/d/" in message
    assert TOKEN not in caught.value.message and "key-of-tests" not in caught.value.message


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_refused_bucket(
    scheme: str,
    store: Emulator,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Credentials were sent, and the server repeats them in its answer; they are in no message and no log."""
    caplog.set_level(logging.DEBUG)
    store.put(SHARDED, "a")
    store.fault = always(403, "")
    message = refusal(f"{scheme}://{BUCKET}/a")
    assert f"{scheme}://{BUCKET}/a/config.json: access is refused (HTTP 403)" in message
    assert any(store.keys_seen)
    logs = caplog.text + "".join(capfd.readouterr())
    assert not any(secret in logs for secret in (TOKEN, SECRET, *filter(None, store.keys_seen)))


def test_stores_that_answer_403_for_absent_objects(store: Emulator) -> None:
    """S3 does so for those who may read and not list."""
    store.put(SHARDED, "a")
    known = set(store.objects)
    store.fault = lambda key, number: None if key in known else 403
    assert_equal(loaded(f"s3://{BUCKET}/a"), loaded(str(SHARDED)))


def test_missing_objects_are_named(store: Emulator) -> None:
    message = refusal(f"gs://{BUCKET}/a/b")
    assert f"gs://{BUCKET}/a/b/config.json is missing, also in the folders above; put" in message
    store.put(SHARDED, "a")
    del store.objects[SHARD]
    assert f"gs://{BUCKET}/{SHARD} is missing or may not be read; copy it there" in refusal(
        f"gs://{BUCKET}/a"
    )
    del store.objects[f"a/{INDEX}"]
    message = refusal(f"gs://{BUCKET}/a")
    assert f"for a step of Orbax gs://{BUCKET}/a/STEP" in message


@pytest.mark.parametrize("change", [-1, 1])
def test_objects_of_another_size_than_their_header_says(change: int, store: Emulator) -> None:
    store.put(SHARDED, "a")
    content = store.objects[SHARD]
    store.write(SHARD, content[:change] if change < 0 else content + b"x")
    message = refusal(f"s3://{BUCKET}/a")
    assert "it has other bytes, and by its header" in message and "cut or changed" in message


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_shard_that_changes_is_refused(scheme: str, store: Emulator) -> None:
    store.put(SHARDED, "a")
    model = model_directory(f"{scheme}://{BUCKET}/a")
    store.write(SHARD, store.objects[SHARD])
    with pytest.raises(CheckpointError, match=f"{scheme}://{BUCKET}/{SHARD} was changed"):
        load_decoder(model, dtype="float32", mesh=mesh_of(1))


def test_a_checkpoint_that_changes_is_refused(store: Emulator, orbax: Path) -> None:
    store.put(orbax, "a")
    model = model_directory(f"gs://{BUCKET}/a")
    store.write("a/params/manifest.ocdbt", store.objects["a/params/manifest.ocdbt"])
    with pytest.raises(CheckpointError, match=f"gs://{BUCKET}/a/params/manifest.ocdbt was changed"):
        load_decoder(model, dtype="float32", mesh=mesh_of(1))


def test_a_revision(store: Emulator) -> None:
    """Others read nothing for a known revision; of a changed bucket the old one is refused."""
    store.put(SHARDED, "a")
    name = f"gs://{BUCKET}/a"
    revision = view_of(name).revision
    store.forget()
    assert view_of(name, revision).revision == revision and not store.requests
    store.write("a/config.json", store.objects["a/config.json"])
    other = view_of(name).revision
    assert other != revision
    with pytest.raises(
        ConfigError, match=f"{name} has the revision {other}, and not {revision[::-1]}"
    ):
        view_of(name, revision[::-1])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gs://user:password@bucket/a", "must not hold a user or a password"),
        ("gs://bucket/../a", "is not the name of a folder in a bucket"),
        ("s3://bucket/a//b", "is not the name of a folder"),
        ("s3://bucket/a?versionId=1", "is not the name of a folder"),
        ("s3://bucket/\x1b[31m", "is not the name of a folder"),
        ("gs:///a", "is not the name of a folder"),
        ("gs://Bucket.With-A_Wrong..Name/a", "is not a name of a bucket"),
        (f"gs://bucket/{'a/' * 600}", "is not the name of a folder"),
        (f"gs://bucket/{'a' * 256}", "is not the name of a folder"),
        ("gs://bucket/model.gguf", "GGUF files are read from disks only"),
        ("gcs://bucket/a", "is not a directory; give .* gs://BUCKET/PATH"),
    ],
)
def test_names(name: str, reason: str, store: Emulator) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        loaded(name)
    assert "password@" not in caught.value.message and not store.requests


@pytest.mark.parametrize("scheme", SCHEMES)
def test_large_files(scheme: str, store: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file above its limit one byte is read, and of a shard with a hostile header eight."""
    store.put(SHARDED, "a")
    store.write(SHARD, (2**60).to_bytes(8, "little") + bytes(1000))
    message = refusal(f"{scheme}://{BUCKET}/a")
    assert f"its header has {2**60} bytes, and at most" in message and store.sent[SHARD] == 8
    store.forget()
    monkeypatch.setitem(views._LIMITS, "config.json", 100)
    message = refusal(f"{scheme}://{BUCKET}/a")
    assert f"{scheme}://{BUCKET}/a/config.json has more than 100 bytes" in message
    assert store.sent["a/config.json"] < 300  # what Google says of it is counted too


def test_names_of_shards_that_leave_the_folder(store: Emulator) -> None:
    store.put(SHARDED, "a")
    for number, name in enumerate(["../secret", "/etc/passwd", "x\ny", "..", "a/b", "\ud800"]):
        store.write(f"a{number}/config.json", store.objects["a/config.json"])
        store.write(f"a{number}/{INDEX}", json.dumps({"weight_map": {"k": name}}).encode())
        store.forget()
        refusal(f"s3://{BUCKET}/a{number}")
        assert all(key.startswith((f"a{number}/", "config.json")) for key in store.requests)


def test_settings_of_a_bucket(store: Emulator) -> None:
    """All processes get the revision; a tokenizer needs no configuration beside it."""
    store.put(SHARDED, "a")
    store.write("text/tokenizer.json", b"{}")
    model = f"gs://{BUCKET}/a"
    config = pinned(EngineConfig(model, tokenizer=f"s3://{BUCKET}/text"))
    assert config.revision == view_of(model).revision and config.model == model
    assert Path(str(config.tokenizer), "tokenizer.json").read_bytes() == b"{}"
    assert with_commit(EngineConfig(model), config.revision).revision == config.revision
    with pytest.raises(ConfigError, match=r"x/tokenizer\.json is missing") as caught:
        pinned(EngineConfig(model, tokenizer=f"s3://{BUCKET}/x"))
    assert caught.value.param == "tokenizer"


def test_an_old_library_is_named(store: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orca_jax.helpers.buckets.store.version", lambda name: "0.1.74")
    assert "need tensorstore 0.1.81 or newer, and 0.1.74 is installed" in refusal(
        f"gs://{BUCKET}/a"
    )


def test_the_tries_are_few() -> None:
    delays = [min(0.25 * 2**number, 8) for number in range(int(names.RETRIES["max_retries"]))]
    assert sum(delays) < 20
