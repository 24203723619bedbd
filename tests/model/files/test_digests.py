"""The list of digests: that of `sha256sum`, compared with the files before they are read."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from orca_jax.helpers.orbax_names import DIGESTS
from orca_jax.model.files.digests import check_digests, write_digests
from orca_jax.values.errors import CheckpointError


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in ("params/a", "params/d/é b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    write_digests(tmp_path)
    return tmp_path


def problems(directory: Path) -> tuple[str, ...]:
    with pytest.raises(CheckpointError, match=f"remove {DIGESTS} or make it again") as caught:
        check_digests(directory)
    return caught.value.problems


def test_the_list_is_that_of_sha256sum(directory: Path) -> None:
    check_digests(directory)
    assert len((directory / DIGESTS).read_text().splitlines()) == 2
    if shutil.which("sha256sum") is not None:
        subprocess.run(
            ["sha256sum", "--strict", "-c", DIGESTS], cwd=directory, check=True, capture_output=True
        )
        text = subprocess.run(
            ["sha256sum", "params/a"], cwd=directory, check=True, capture_output=True
        ).stdout
        (directory / DIGESTS).write_bytes(text)
        check_digests(directory)


def test_without_a_list_nothing_is_compared(directory: Path) -> None:
    (directory / "params" / "a").write_text("other")
    (directory / DIGESTS).unlink()
    check_digests(directory)


def test_each_file_is_named(directory: Path) -> None:
    (directory / "params" / "a").unlink()
    (directory / "params" / "d" / "é b").write_text("other")
    assert problems(directory) == (
        f"params/a: cannot be read: {directory}/params/a: No such file or directory",
        f"params/d/é b: has other bytes than those of {DIGESTS}",
    )


@pytest.mark.parametrize(
    "line",
    [
        "",
        "x",
        "0" * 64 + "  config.json",
        "0" * 64 + "  params/../../x",
        "0" * 63 + "  params/a",
        "\x00",
    ],
)
def test_other_lines_are_refused(directory: Path, line: str) -> None:
    (directory / DIGESTS).write_text(f"{line}\n")
    (problem,) = problems(directory)
    assert (
        problem.startswith(f"{DIGESTS}: {line!r:.50}") and "is not a line of `sha256sum`" in problem
    )


def test_a_pipe_is_refused_at_once(directory: Path) -> None:
    (directory / DIGESTS).unlink()
    os.mkfifo(directory / DIGESTS)
    assert problems(directory) == (f"{DIGESTS}: cannot be read: not a regular file",)
