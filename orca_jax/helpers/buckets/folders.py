"""Private folders, shared by the processes of one user by name.

A folder goes with its last process, or at the next use of any if that process was killed.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from orca_jax.values.checks import distrust

_WHOLE = "whole"  # in a folder with all of its files
_held: dict[str, int] = {}  # descriptors of the folders that this process uses, by name


def shared_root() -> Path:
    """Return the folder with all shared ones. It may not exist."""
    return Path(tempfile.gettempdir()) / f"orca-jax-buckets-{os.geteuid()}"


def hold(name: str) -> bool:
    """Keep a shared folder as long as this process; False if there is none. Raises OSError."""
    with _locked() as root:
        return _hold(root, name)


def make(name: str, files: Mapping[str, bytes]) -> None:
    """Make a shared folder with these files, unless there is one, and keep it as long as this process.

    The times of its files are always the same.

    Raises:
        OSError: it cannot be written, or others could write in it.
    """
    with _locked() as root:
        if _hold(root, name):
            return
        folder = root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        _keep(folder)
        for place, content in files.items():
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            os.utime(path, (0, 0))
        (folder / _WHOLE).touch()


@contextmanager
def _locked() -> Iterator[Path]:
    """The folder with all shared ones, while no other process changes it."""
    root = shared_root()
    root.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if reason := distrust(os.fstat(descriptor)):
            raise OSError(f"{root} must not be used: {reason}")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield root
    finally:
        os.close(descriptor)


def _hold(root: Path, name: str) -> bool:
    for folder in root.iterdir():
        if folder.name != name and folder.name not in _held:
            _remove_unused(folder)
    if name in _held:
        return True
    if not (root / name / _WHOLE).is_file():
        return False
    _keep(root / name)
    return True


def _keep(folder: Path) -> None:
    if not _held:
        atexit.register(_release_at_end, os.getpid())
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    _held[folder.name] = descriptor


def _remove_unused(folder: Path) -> None:
    """Remove a folder unless a process uses it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:  # another process uses it
        pass
    finally:
        os.close(descriptor)


def _release_at_end(owner: int) -> None:
    if os.getpid() == owner:  # else a fork
        release()


def release() -> None:
    """Stop to use all folders, and remove them unless another process uses them. Raises OSError."""
    if not _held:
        return
    with _locked() as root:
        for name, descriptor in _held.items():
            os.close(descriptor)
            _remove_unused(root / name)
    _held.clear()
