"""The programs of processes with devices."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A directory for the programs of all processes, which are few and compiled quickly."""
    with pytest.MonkeyPatch.context() as patch:
        paths = Path(__file__).parent / "fewer", Path(__file__).parents[2]
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
        patch.setenv("JAX_PLATFORMS", "cpu")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        patch.setenv("JAX_THREAD_GUARD", "1")  # device programs are started by one thread
        yield str(tmp_path_factory.mktemp("programs"))
