"""Files of reports are replaced, completely or not at all, without an effect on other files."""

import os
import threading
from pathlib import Path

import pytest

from orca_jax.helpers import reporting
from orca_jax.helpers.reporting import write_file


def test_a_file_is_replaced_through_a_hidden_part_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, neighbour, link = (
        tmp_path / "report.json",
        tmp_path / "report.json.new",
        tmp_path / "link",
    )
    target.write_bytes(b"old")
    target.chmod(0o640)
    neighbour.write_bytes(b"a file of the user")
    link.symlink_to(target)
    parts: list[str] = []
    real = Path.replace
    monkeypatch.setattr(
        reporting.Path, "replace", lambda part, to: parts.append(part.name) or real(part, to)
    )
    write_file(link, b"new")
    assert parts == [".report.json.part"]
    assert (
        target.read_bytes() == b"new"
        and target.stat().st_mode & 0o777 == 0o640
        and link.is_symlink()
    )
    assert neighbour.read_bytes() == b"a file of the user"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "link",
        "report.json",
        "report.json.new",
    ]


def test_a_failure_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(part: Path, to: Path) -> Path:
        raise OSError("the disk is full")

    target = tmp_path / "report.json"
    target.write_bytes(b"old")
    monkeypatch.setattr(reporting.Path, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        write_file(str(target), b"new")
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_file(pipe, b"new")
    reader.join(10)
    assert read == [b"new"] and pipe.is_fifo()
