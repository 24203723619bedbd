"""Compiled programs of earlier runs, in pytest's cache: `scripts/test --cache-clear` forgets them.

JAX finds a program by its lowered code, the version of XLA and its options, so no change of the package makes it wrong.
A folder holds those of one kind of processor. The workers of a run share it: a file appears whole or not at all. A run
begins without those that were not used for longest, if all take more than `MOST` bytes.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src import compilation_cache as of_jax
from jax._src.compilation_cache_interface import CacheInterface

from orca_jax.helpers.processor import all_cpu_flags, cpu_name

MOST = 1 << 30
"""Bytes of all programs at the begin of a run."""

LEAST_SECONDS = 0.0
"""Programs that were compiled more quickly are not kept."""


class KeptPrograms(CacheInterface):
    """The files of a folder, by the names that JAX gives to programs."""

    def __init__(self, folder: Path) -> None:
        """Use a folder, which appears with its first program."""
        self._path = folder

    def get(self, key: str) -> bytes | None:
        """The program, which is now the last one used; None if it is absent."""
        path = self._path / key
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        return data

    def put(self, key: str, value: bytes) -> None:
        """Keep a program."""
        self._path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self._path, delete=False) as file:
            file.write(value)
        os.replace(file.name, self._path / key)


class SharedPrograms:
    """Caches of JAX whose programs the workers of a run share, by their directories.

    Args:
        folder: the programs of earlier runs; None: a directory has those of this run alone.
    """

    def __init__(self, folder: Path | None) -> None:
        """Answer for JAX from now on."""
        self._folder = folder
        self._directories: list[Path] = []
        self._others = of_jax.get_file_cache
        of_jax.get_file_cache = self._cache

    def share(self, directory: Path) -> None:
        """Share the programs of a directory, and of those within it."""
        self._directories.append(directory)

    def _cache(self, path: str) -> Any:
        """The cache that JAX makes for a directory."""
        if any(Path(path).is_relative_to(directory) for directory in self._directories):
            return KeptPrograms(self._folder or Path(path)), path
        return self._others(path)


SHARED = pytest.StashKey[SharedPrograms]()


def kept_folder(config: pytest.Config, name: str = "programs") -> Path:
    """A folder that stays for later runs, of programs for this kind of processor."""
    kind = hashlib.sha256(repr((cpu_name(), all_cpu_flags())).encode()).hexdigest()[:16]
    return config.cache.mkdir(name) / kind


def keep_programs(config: pytest.Config) -> None:
    """Let JAX look for programs among those of earlier runs, and keep new ones."""
    folder = kept_folder(config)
    if not hasattr(config, "workerinput"):
        remove_oldest(folder)
        remove_oldest(kept_folder(config, "processes") / "private")
    config.stash[SHARED] = shared = SharedPrograms(folder)
    shared.share(folder)
    shared.share(Path.home() / ".cache" / "orca-jax" / "programs")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


@contextmanager
def forgetting() -> Iterator[None]:
    """Use no programs but those of directories that a test names."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    of_jax.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        of_jax.reset_cache()


def remove_oldest(folder: Path, most: int = MOST) -> None:
    """Remove the files that were not used for longest, until the others take at most so many bytes."""
    found = os.scandir(folder) if folder.exists() else ()
    files = [(file.stat(), file.path) for file in found if file.is_file()]
    files.sort(key=lambda file: file[0].st_mtime)
    size = sum(status.st_size for status, _ in files)
    for status, path in files:
        if size <= most:
            return
        os.unlink(path)
        size -= status.st_size
