"""This process as another user, for tests of owners and modes."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes the owners of files")


@contextmanager
def as_user(user: int, group: int, groups: list[int]) -> Iterator[None]:
    """This process as another user. Its own groups come back at the end."""
    before = os.getgroups(), os.getegid()
    os.setgroups(groups)
    os.setegid(group)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(before[1])
        os.setgroups(before[0])


@contextmanager
def reachable_folder() -> Iterator[Path]:
    """A folder that other users reach; pytest's own are for one user alone."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    try:
        yield path
    finally:
        shutil.rmtree(path)
