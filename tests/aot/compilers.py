"""XLA's compilers for devices that are not here: `scripts/test` keeps them in `.compilers`, apart from the environment.

They come into a process only when something is compiled by them. JAX would otherwise find them at its start, and look
for the devices.
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
    """Skip the module that calls this where a compiler is missing."""
    for package in packages:
        if PathFinder.find_spec(package, [*sys.path, str(FOLDER)]) is None:
            pytest.skip(f"there is no {package}; scripts/test gets it on Linux x86-64", allow_module_level=True)


@cache
def use_compilers() -> None:
    """Let this process import them."""
    if FOLDER.is_dir():
        sys.path.append(str(FOLDER))


@cache
def use_cuda() -> None:
    """Register JAX's plugin for GPUs, unless JAX has found it already."""
    use_compilers()
    runtime = FOLDER / "jax_cuda12_plugin" / "libmosaic_gpu_runtime.so"
    if runtime.is_file():
        # Mosaic looks for it when it is imported, which another test may have done by now.
        os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)
    if "cuda" not in xla_bridge._backend_factories:
        importlib.import_module("jax_plugins.xla_cuda12").initialize()
