"""The part of an accelerator's memory that this process may use, and the threads of a CPU.

JAX takes three quarters of a GPU at its first use, and reports that part as the device's memory. So the share is set
before, by JAX's environment variable. A share of the whole card is computed from the reported part. The number of
threads is set in the same way.
"""

import os
from collections.abc import Mapping

import jax

from orca_jax.exec.host import num_processors
from orca_jax.values.errors import ConfigError
from orca_jax.values.platforms import Platform

# the second name is deprecated
_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_THREADS = ("PJRT_NPROC", "NPROC")  # of XLA, which takes the first one that is set
_DEFAULT = 0.75  # of JAX


def has_jax_started() -> bool:
    """True if JAX has opened its devices in this process. It shows this only by refusing changes of some settings."""
    before = jax.config.jax_num_cpu_devices
    try:
        jax.config.update("jax_num_cpu_devices", before + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", before)
    return False


def claim_memory(utilization: float) -> None:
    """Make JAX take this share of each GPU. Without effect once JAX has started, or if the user has set a share."""
    if not has_jax_started() and not any(os.environ.get(name) for name in _VARIABLES):
        os.environ[_VARIABLES[0]] = str(utilization)


def limit_threads(devices: int = 1) -> None:
    """Make XLA start a thread for each processor in each of its pools, unless the user has set their number.

    XLA counts the processors of the affinity, without the quotas of control groups: with a quota of 2 on 64 processors
    all 64 threads of a pool would compete for the time of two. Without effect once JAX has started.

    Args:
        devices: JAX's devices on this CPU. There is at least a thread for each of them.
    """
    if not has_jax_started() and not any(os.environ.get(name) for name in _THREADS):
        os.environ[_THREADS[0]] = str(max(num_processors(), devices))


def usable_bytes(stats: Mapping[str, int] | None, platform: Platform, utilization: float) -> int:
    """Bytes of one accelerator that this process may use, those in use included.

    Args:
        stats: the memory statistics of the device, from JAX.
        platform: of the device.
        utilization: share of the whole memory. On GPUs the share taken by JAX is a second limit.

    Raises:
        ConfigError: JAX does not know the size of the memory.
    """
    if not stats or "bytes_limit" not in stats:
        raise ConfigError(
            "JAX does not report the size of this device's memory; set num_pages", param="num_pages"
        )
    limit = stats["bytes_limit"]
    if not platform.shares_memory:
        return int(limit * utilization)
    taken = next((float(value) for name in _VARIABLES if (value := os.environ.get(name))), _DEFAULT)
    return min(limit, int(limit / taken * utilization))


def sharing_environment(compile_cache: str | None) -> dict[str, str]:
    """The environment of another process with JAX, which takes memory as it needs it, and keeps compiled programs."""
    variables = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if compile_cache is not None:
        variables["JAX_COMPILATION_CACHE_DIR"] = compile_cache
        variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        variables["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    return os.environ | variables
