"""XLA's compilers for absent devices. `scripts/test` keeps them in `.compilers`, outside the environment.

A process imports them only when it compiles with them. Otherwise JAX would find them at its start, and look for the
devices.
"""

import importlib
import os
import sys
from functools import cache
from importlib.machinery import PathFinder

import pytest
from jax._src import xla_bridge

from tests.project.source import ROOT

FOLDER = ROOT / ".compilers"
CUDA = FOLDER / "nvidia" / "cuda_nvcc"


def skip_without(*packages: str) -> None:
    """Skip the calling module if a compiler is missing."""
    for package in packages:
        if PathFinder.find_spec(package, [*sys.path, str(FOLDER)]) is None:
            pytest.skip(
                f"{package} is missing; scripts/test installs it on Linux x86-64",
                allow_module_level=True,
            )


@cache
def use_compilers() -> None:
    """Make the compilers importable in this process."""
    if FOLDER.is_dir():
        sys.path.append(str(FOLDER))


@cache
def use_cuda() -> None:
    """Register JAX's plugin for GPUs, unless JAX has already found it."""
    use_compilers()
    runtime = FOLDER / "jax_cuda12_plugin" / "libmosaic_gpu_runtime.so"
    if runtime.is_file():
        # Mosaic reads this when it is imported; another test may have imported it already.
        os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)
    if "cuda" not in xla_bridge._backend_factories:
        importlib.import_module("jax_plugins.xla_cuda12").initialize()
