"""Pages in files: whole and of the right text or absent, bounded, and of use to a later process."""

import errno
import os
import random
import signal
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import pytest

from orca_jax.exec.tiers import files
from orca_jax.exec.tiers.base import PageName, StoredPage
from orca_jax.exec.tiers.files import FileTier
from orca_jax.values.errors import ConfigError
from tests.mutations import mutate_bytes
from tests.users import needs_root

IDENTITY = sha256(b"model").digest()
PAYLOAD = bytes(range(256)) * 4
OVERHEAD = 8 + 32 + 32 + 2 + 4 + 40
SIZE = len(PAYLOAD) + OVERHEAD


def name_of(number: int, group: int = 0) -> PageName:
    return group, sha256(b"%d" % number).digest()


def page_of(number: int, group: int = 0, payload: bytes = PAYLOAD) -> StoredPage:
    return StoredPage(name_of(number, group), number, (payload[:100], payload[100:]))


def tier_in(folder: Path, pages: int = 100, identity: bytes = IDENTITY) -> FileTier:
    tier = FileTier(str(folder), identity, pages * SIZE)
    tier.scan()
    return tier


def files_in(folder: Path) -> list[Path]:
    """Whole files; those of a killed writer have a folder of their own."""
    return sorted(path for path in folder.rglob("*.kv") if ".part-" not in path.parent.name)


def age(folder: Path, minutes: int) -> None:
    """Make all files older."""
    for path in files_in(folder):
        then = path.stat().st_mtime - 60 * minutes
        os.utime(path, (then, then))


def test_a_page_is_read_by_a_later_process(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    for number in range(3):
        tier.write(page_of(number, group=number))
    later = tier_in(tmp_path)
    assert all(name_of(number, number) in later for number in range(3))
    assert name_of(1, 0) not in later
    assert later.read(name_of(2, 2)) == PAYLOAD
    assert later.num_bytes == tier.num_bytes == 3 * SIZE
    assert sum(path.stat().st_size for path in files_in(tmp_path)) == 3 * SIZE


def test_a_file_has_the_documented_form(tmp_path: Path) -> None:
    tier_in(tmp_path).write(page_of(5, group=2))
    (path,) = files_in(tmp_path)
    digest = name_of(5)[1]
    place = path.relative_to(tmp_path).as_posix()
    assert place == f"{IDENTITY.hex()[:32]}/{digest.hex()[:2]}/{digest.hex()}-2-5.kv"
    head = b"ORCA-KV\x01" + IDENTITY + digest + b"\x02\x00" + b"\x05\x00\x00\x00"
    assert path.read_bytes()[:-40] == head + PAYLOAD
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_pages_of_another_model_stay(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    tier.write(page_of(1))
    other = tier_in(tmp_path, pages=1, identity=sha256(b"other").digest())
    assert name_of(1) not in other
    for number in range(3):
        other.write(page_of(number))
    other.clear()
    assert tier.read(name_of(1)) == PAYLOAD


def test_the_folder_is_bounded_and_keeps_what_was_used(tmp_path: Path) -> None:
    tier = tier_in(tmp_path, pages=4)
    for number in range(4):
        tier.write(page_of(number))
    tier.touch([name_of(1), name_of(0)])
    for number in range(10, 12):
        tier.write(page_of(number))
    kept = [number for number in (*range(4), 10, 11) if name_of(number) in tier]
    assert kept == [0, 1, 10, 11]
    assert len(files_in(tmp_path)) == 4 and tier.num_bytes == 4 * SIZE
    tier.write(page_of(20, payload=bytes(5 * SIZE)))
    assert name_of(20) not in tier, "larger than the tier"


def test_a_later_start_keeps_the_beginnings_of_texts_and_what_was_used_last(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    for number in range(4):
        tier.write(page_of(number))
    age(tmp_path, 10)
    again = tier_in(tmp_path)
    again.touch([name_of(3)])
    smaller = tier_in(tmp_path, pages=2)
    assert [number for number in range(4) if name_of(number) in smaller] == [0, 3]


def test_mutated_files_are_absent(tmp_path: Path) -> None:
    """Each damage is found, and the file is removed."""
    tier = tier_in(tmp_path)
    tier.write(page_of(1))
    (path,) = files_in(tmp_path)
    whole = path.read_bytes()
    draw = random.Random(3)
    damaged = [whole[:cut] for cut in range(0, len(whole), 97)]
    damaged += [other for _ in range(300) if (other := mutate_bytes(whole, draw)) != whole]
    for content in damaged:
        path.write_bytes(content)
        tier.scan()
        with pytest.raises((OSError, ValueError)):
            tier.read(name_of(1))
        assert name_of(1) not in tier and not path.exists()
        tier.write(page_of(1))
        assert tier.read(name_of(1)) == PAYLOAD


def test_a_whole_file_of_another_page_is_absent(tmp_path: Path) -> None:
    """The checksum covers the name, and the header the model."""
    tier = tier_in(tmp_path)
    tier.write(page_of(1))
    (path,) = files_in(tmp_path)
    other = sha256(b"other").digest()
    foreign = tier_in(tmp_path, identity=other)
    place = tmp_path / other.hex()[:32] / path.parent.name
    place.mkdir(mode=0o700)
    (place / path.name).write_bytes(path.read_bytes())
    foreign.scan()
    with pytest.raises(ValueError, match="another page"):
        foreign.read(name_of(1))


def test_links_and_strange_names_are_no_pages(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    tier.write(page_of(1))
    (path,) = files_in(tmp_path)
    secret = tmp_path / "secret"
    path.rename(secret)
    path.symlink_to(secret)
    for name in ("x.kv", "0" * 64 + "-0-0.kv.bak", "0" * 64 + "-" + "9" * 6 + "-0.kv"):
        (path.parent / name).touch()
    tier.scan()
    with pytest.raises(OSError, match=r"."):
        tier.read(name_of(1))
    assert secret.exists()


def test_a_full_disk_is_no_error_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_in(tmp_path)

    def full(path: Path, *content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_file", full)
        with pytest.raises(OSError, match="No space left"):
            tier.write(page_of(1))
    tier.write(page_of(1))
    assert name_of(1) not in tier, "it pauses"
    now = time.monotonic()
    monkeypatch.setattr(files.time, "monotonic", lambda: now + 61)
    tier.write(page_of(1))
    assert tier.read(name_of(1)) == PAYLOAD


def test_two_servers_share_a_folder(tmp_path: Path) -> None:
    """One removes what the other one lists."""
    one = tier_in(tmp_path, pages=3)
    other = tier_in(tmp_path, pages=3)
    one.write(page_of(1))
    other.write(page_of(1))
    assert one.read(name_of(1)) == other.read(name_of(1)) == PAYLOAD
    one.clear()
    with pytest.raises(FileNotFoundError):
        other.read(name_of(1))
    assert name_of(1) not in other and not other.num_bytes


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for path, reason in ((file, "it is not a directory"), (shared, "all users can write to it")):
        with pytest.raises(ConfigError, match=f"kv_disk: .*{reason}") as caught:
            tier_in(path)
        assert caught.value.param == "kv_disk"


@needs_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        tier_in(tmp_path)


@needs_root
def test_a_file_of_another_user_is_absent(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    tier.write(page_of(1))
    (path,) = files_in(tmp_path)
    os.chown(path, 65534, 65534)
    with pytest.raises(ValueError, match="belongs to user 65534"):
        tier.read(name_of(1))
    assert name_of(1) not in tier


WRITER = """
import sys
from pathlib import Path
from tests.tiers.test_files import page_of, tier_in
tier = tier_in(Path(sys.argv[1]), pages=50)
for number in range(10**6):
    tier.write(page_of(number % 200))
    if not number:
        print("begun", flush=True)
"""


def test_a_killed_writer_leaves_whole_files(tmp_path: Path) -> None:
    draw = random.Random(1)
    for _ in range(3):
        command = [sys.executable, "-c", WRITER, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(draw.random() / 20)  # the moment of the kill
            writer.send_signal(signal.SIGKILL)
        tier = tier_in(tmp_path, pages=50)
        found = [number for number in range(200) if name_of(number) in tier]
        assert found and all(tier.read(name_of(number)) == PAYLOAD for number in found)
        assert len(files_in(tmp_path)) <= 50
    for part in tmp_path.rglob(".part-*"):
        os.utime(part, (0, 0))
    tier_in(tmp_path)
    assert not list(tmp_path.rglob(".part-*"))
