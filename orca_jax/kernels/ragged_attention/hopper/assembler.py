"""The assembler of PTX: its path, and the versions with which the Hopper kernels are wrong."""

import re
import shutil
import subprocess
from functools import cache
from importlib import import_module, metadata
from pathlib import Path

MISCOMPILING = (12, 8), (12, 9, 86)
"""The first version of `ptxas` that miscompiles loops of masked wgmma, and the first later one that does not: that of
CUDA 12.9.1. JAX refuses the versions between in its own kernel too."""

SYSTEM = "/usr/local/cuda"  # of an installation for the whole machine

_SECONDS = 20.0  # for `ptxas --version` on a busy machine
_VERSION = re.compile(r"\bV(\d+)\.(\d+)\.(\d+)")


def refusal_of_assembler() -> str | None:
    """The reason why a program of this machine's assembler may be wrong, or None.

    XLA takes `ptxas`, or nvJitLink from its package, which has the same versions. If neither is found, the CUDA runtime
    decides, whose version does not tell 12.9.0 from 12.9.1.
    """
    runtime = cuda_runtime()
    found = {"ptxas": ptxas_version(), "nvJitLink": nvjitlink_version()}
    known = {name: version for name, version in found.items() if version is not None}
    first, mended = MISCOMPILING
    for name, version in (known or {"CUDA": (runtime // 1000, runtime % 1000 // 10)}).items():
        if first <= version < mended:
            return (
                f"attention 'gpu' needs ptxas before 12.8 or from 12.9.86 on: {name} {'.'.join(map(str, version))} "
                "miscompiles masked products; upgrade the packages of CUDA, or install the extra cuda13"
            )
    return None


def nvjitlink_version() -> tuple[int, ...] | None:
    """The version of NVIDIA's package of nvJitLink for CUDA 12, or None."""
    try:
        return tuple(map(int, metadata.version("nvidia-nvjitlink-cu12").split(".")))
    except (metadata.PackageNotFoundError, ValueError):
        return None


@cache
def ptxas_version() -> tuple[int, ...] | None:
    """The version of the `ptxas` that XLA takes: that of JAX's packages, of PATH, or of /usr/local/cuda. None: none."""
    path = find_ptxas()
    if path is None:
        return None
    try:
        told = subprocess.run(
            [path, "--version"], capture_output=True, text=True, check=True, timeout=_SECONDS
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(told)
    if found is None:
        return None
    return tuple(map(int, found.groups()))


def find_ptxas() -> str | None:
    """The path of `ptxas`, in the order in which XLA searches."""
    # JAX's path is the text "None" if its package is there without an assembler.
    root = getattr(import_module("jax._src.lib"), "cuda_path", None)
    for folder in (root, None, SYSTEM):
        if found := shutil.which(
            "ptxas", path=None if folder is None else str(Path(folder) / "bin")
        ):
            return found
    return None


def cuda_runtime() -> int:
    """The CUDA runtime of this process as CUDA counts, 12080 for 12.8; 0 if JAX's plugin for CUDA 12 has none."""
    try:
        return int(import_module("jax_cuda12_plugin._versions").cuda_runtime_get_version())
    except (ImportError, AttributeError, RuntimeError):
        return 0
