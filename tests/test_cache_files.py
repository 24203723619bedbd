"""Files of the compile cache: whole, and written by nobody else, in the folders that containers have."""

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from orca_jax.assembly.resolve import cache_directory
from orca_jax.helpers import cache_files
from orca_jax.helpers.cache_files import (
    distrust,
    own_folder,
    read_file,
    refusal,
    remove_distrusted,
    write_file,
)
from tests.mutations import mutate_bytes
from tests.users import as_user, needs_root, reachable_folder

CONTENT = bytes(range(256)) * 8


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    for content in (CONTENT, b"", b"other"):
        write_file(tmp_path / "file", content)
        assert read_file(tmp_path / "file") == content
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_a_file_reaches_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash of the machine there is the old file or the new one."""
    done: list[str] = []
    monkeypatch.setattr(
        cache_files.os, "fsync", lambda _: done.append(str((tmp_path / "file").exists()))
    )
    write_file(tmp_path / "file", CONTENT)
    assert done == ["False"]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    draw, path = random.Random(7), tmp_path / "file"
    write_file(path, CONTENT)
    whole = path.read_bytes()
    damaged = [whole[:size] for size in (0, 1, 39, 40, len(whole) // 2, len(whole) - 1)]
    damaged += [whole + b"\0", whole + whole, bytes(len(whole))]
    damaged += [
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 31)
    ]
    damaged += [other for _ in range(100) if (other := mutate_bytes(whole, draw)) != whole]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"it is not (whole|what was written)"):
            read_file(path)


def test_a_file_under_another_name_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "one", CONTENT)
    (tmp_path / "one").rename(tmp_path / "two")
    with pytest.raises(ValueError, match="not what was written"):
        read_file(tmp_path / "two")


def test_a_large_file_of_nothing_is_refused_before_it_is_read(tmp_path: Path) -> None:
    write_file(tmp_path / "file", CONTENT)
    os.truncate(tmp_path / "file", 2**40)
    with pytest.raises(ValueError, match="not whole"):
        read_file(tmp_path / "file")


@pytest.mark.timeout(20)
def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "file", CONTENT)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    for name in ("fifo", "folder", "link", "absent"):
        with pytest.raises((ValueError, OSError)):
            read_file(tmp_path / name)


def status(mode: int, user: int, group: int) -> os.stat_result:
    return os.stat_result((mode, 1, 1, 1, user, group, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "user", "group", "reason"),
    [
        (0o600, 10001, 10001, ""),
        (0o644, 0, 0, ""),
        (0o660, 10001, 10001, ""),
        (0o660, 10001, 2000, ""),
        (0o664, 0, 2000, ""),
        (0o660, 10001, 100, "its group 100, to which this process does not belong"),
        (0o602, 10001, 10001, "all users can write"),
        (0o600, 10002, 10001, "it belongs to user 10002, and this process runs as user 10001"),
    ],
)
def test_owners_and_modes(
    mode: int, user: int, group: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"geteuid": 10001, "getegid": 10001, "getgroups": [2000]}.items():
        monkeypatch.setattr(os, name, lambda value=value: value)
    found = distrust(status(0o100000 | mode, user, group))
    assert found.startswith(reason) and bool(found) == bool(reason)


def test_a_link_or_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "private").symlink_to("elsewhere")
    assert refusal(own_folder(str(tmp_path))) == "it is not a directory"
    (tmp_path / "private").unlink()
    (tmp_path / "private").touch()
    assert refusal(own_folder(str(tmp_path))) == "it is not a directory"


def test_files_of_others_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From JAX's own cache, which runs what it finds."""
    (tmp_path / "folder").mkdir(mode=0o777)
    for name in ("good", "open"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o666 if name == "open" else 0o600)
    (tmp_path / "link").symlink_to("good")
    with caplog.at_level(logging.WARNING):
        remove_distrusted(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "good"]
    assert len(caplog.messages) == 2 and str(tmp_path / "open") in caplog.text


@pytest.fixture
def volume() -> Iterator[Path]:
    with reachable_folder() as path:
        yield path


# owner, group and mode of the volume; user, group and other groups of the process; the fsGroup
VOLUMES = {
    "a claim with fsGroup": ((0, 10001, 0o2775), (10001, 10001, [10001]), 10001),
    "an empty directory with fsGroup": ((0, 10001, 0o2777), (10001, 10001, [10001]), 10001),
    "an fsGroup unlike the user's group": ((0, 2000, 0o2775), (10001, 0, [2000]), 2000),
    "an empty directory without fsGroup": ((0, 0, 0o777), (10001, 10001, []), None),
    "the folder of the image": ((10001, 10001, 0o700), (10001, 10001, []), None),
    "an arbitrary user of group 0": ((0, 0, 0o775), (1000680000, 0, []), None),
}


@needs_root
@pytest.mark.parametrize("kind", VOLUMES)
def test_the_volumes_of_containers_keep_the_cache(kind: str, volume: Path) -> None:
    (owner, group, mode), process, fs_group = VOLUMES[kind]
    place = volume / "cache"
    place.mkdir()
    os.chown(place, owner, group)
    place.chmod(mode)
    with as_user(*process):
        folder = own_folder(str(place))
        assert folder.stat().st_mode & 0o777 == 0o700 and not refusal(folder)
        write_file(folder / "program", CONTENT)
    # the next pod: all is given to the group, which may then read and write
    if fs_group is not None:
        for path in (place, folder, folder / "program"):
            os.chown(path, -1, fs_group)
            path.chmod(path.stat().st_mode & 0o7777 | (0o2770 if path.is_dir() else 0o660))
    with as_user(*process):
        assert own_folder(str(place)) == folder and not refusal(folder)
        remove_distrusted(folder)
        assert read_file(folder / "program") == CONTENT
    place.chmod(0o755)
    with as_user(20002, 20002, []):
        assert (
            refusal(folder)
            == f"it belongs to user {process[0]}, and this process runs as user 20002"
        )


@needs_root
def test_a_cache_of_root_is_used_by_all_who_can_read_it(volume: Path) -> None:
    """An image that was filled at its build."""
    folder = own_folder(str(volume))
    write_file(folder / "program", CONTENT)
    folder.chmod(0o755)
    (folder / "program").chmod(0o644)
    with as_user(10001, 10001, []):
        assert own_folder(str(volume)) == folder and not refusal(folder)
        assert read_file(folder / "program") == CONTENT
    os.chown(folder / "program", 20002, 20002)
    with as_user(10001, 10001, []), pytest.raises(ValueError, match="belongs to user 20002"):
        read_file(folder / "program")


def test_no_home_directory_means_no_compile_cache(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_directory("auto") is None and "no home directory" in caplog.text
    assert (
        cache_directory(str(tmp_path)) == str(tmp_path / "private")
        and cache_directory(None) is None
    )


def test_a_compile_cache_that_others_can_write_is_not_used(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private").chmod(0o777)
    assert cache_directory(str(tmp_path)) is None
    (message,) = caplog.messages
    assert (
        str(tmp_path / "private") in message
        and "all users can write to it" in message
        and "chmod" in message
    )
