"""The programs of processes with devices."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory for the programs of all processes, which are few and compiled quickly, with the library in C.

    It stays for later runs.
    """
    from tests.kernels.native.machine import keep_library  # it imports JAX
    from tests.run.kept import kept_folder

    found = kept_folder(pytestconfig, "processes")
    if pytestconfig.getoption("fresh_programs"):
        found = tmp_path_factory.mktemp("programs")
    found.mkdir(parents=True, exist_ok=True)
    keep_library(found)
    return str(found)


@pytest.fixture(scope="module")
def cache(folder: str) -> Iterator[str]:
    """The directory, in an environment for the processes of a module. Other tests start processes without it."""
    with pytest.MonkeyPatch.context() as patch:
        paths = Path(__file__).parent / "fewer", Path(__file__).parents[2]
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv("JAX_THREAD_GUARD", "1")  # device programs are started by one thread
        yield folder
