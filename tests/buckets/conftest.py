"""A store of this machine, and the environment that leads TensorStore to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_jax.helpers.buckets import folders, names
from tests.buckets.emulator import SECRET, TOKEN, Emulator, running


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Emulator]:
    """An empty store. Views are in a folder of the test, and failed requests are soon tried again."""
    with running(Emulator()) as found:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", found.url)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", TOKEN)
        monkeypatch.setenv("AWS_ENDPOINT_URL", found.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key-of-tests")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        monkeypatch.setitem(names.RETRIES, "initial_delay", "1ms")
        monkeypatch.setitem(names.RETRIES, "max_delay", "2ms")
        yield found
    folders.release()
