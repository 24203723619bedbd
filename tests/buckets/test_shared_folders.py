"""Folders of views: shared by processes, gone with the last one, and removed if that one was killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orca_jax.helpers.buckets import folders
from orca_jax.helpers.buckets.folders import shared_root
from orca_jax.helpers.buckets.views import view_of
from orca_jax.values.errors import ConfigError
from tests.buckets.emulator import BUCKET, Emulator

NAME = f"s3://{BUCKET}/a"
PROGRAM = f"""
import sys
from orca_jax.helpers.buckets.views import view_of
print(view_of({NAME!r}).folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def model(store: Emulator) -> Emulator:
    """A store with a model without weights."""
    store.write("a/config.json", b"{}")
    return store


@contextmanager
def another_process() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that uses the view, and the folder."""
    environment = os.environ | {"TMPDIR": str(shared_root().parent)}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def left() -> list[Path]:
    return [path for path in shared_root().rglob("*") if path.is_file()]


def test_a_folder_goes_with_the_last_process(model: Emulator) -> None:
    with another_process() as (process, folder):
        assert view_of(NAME).folder == folder and (folder / "config.json").read_bytes() == b"{}"
        assert shared_root().stat().st_mode & 0o777 == 0o700
        process.communicate("")
        assert left()
    folders.release()
    assert not left()


def test_a_killed_process_leaves_nothing(model: Emulator) -> None:
    with another_process() as (process, folder):
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert left()
    model.write("other/config.json", b"{}")
    view_of(f"s3://{BUCKET}/other")
    assert not folder.exists() and len(left()) == 3


def test_a_folder_that_is_not_whole_is_made_again(model: Emulator) -> None:
    view = view_of(NAME)
    folders.release()
    (view.folder / "x").mkdir(parents=True)
    assert view_of(NAME, view.revision).revision == view.revision
    assert not (view.folder / "x").exists() and (view.folder / "config.json").exists()


def test_a_folder_in_which_others_can_write_is_refused(model: Emulator) -> None:
    shared_root().mkdir()
    shared_root().chmod(0o777)
    with pytest.raises(ConfigError, match="all users can write to it; set TMPDIR to another one"):
        view_of(NAME)
    shared_root().chmod(0o700)
