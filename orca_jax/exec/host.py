"""Memory and processors of this process: those of the machine, within the limits of its control groups (Linux)."""

import ctypes
import logging
import os
from collections.abc import Iterator, Set
from math import ceil, inf
from pathlib import Path

from orca_jax.values.errors import ConfigError

logger = logging.getLogger(__name__)

_ROOT = Path("/")
_PART_OF_UNKNOWN = 3  # a third of all memory is taken where the free part is not known
# version: limits, usage, and a key of memory.stat: the part of the usage that can be given back
_MEMORY_FILES = {
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}
_UNLIMITED = 2**60  # version 1 writes a number beyond any memory instead of "max"


def free_memory(root: Path = _ROOT) -> int:
    """Bytes available to this process without swapping.

    The least of the machine's available memory and of the rest in each control group, from that of the process up to
    the outermost one. `root` replaces the root of the file system in tests.

    Raises:
        ConfigError: the system reports no memory at all; `param` is "num_pages".
    """
    left = [_left(group, version) for version, group in _groups(root, "memory")]
    return int(min(_available(root), *left, inf))


def num_processors(root: Path = _ROOT) -> int:
    """Processors that this process may use at once: those of its affinity, within the quotas of its control groups."""
    cores = len(_affinity()) or os.cpu_count() or 1
    quota = min((_quota(group, version) for version, group in _groups(root, "cpu")), default=inf)
    if quota < inf:
        return max(1, min(cores, ceil(quota)))
    return cores


def _affinity() -> Set[int]:
    """The processors on which this process may run; empty on systems that do not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    return os.sched_getaffinity(0)


def num_sockets(root: Path = _ROOT) -> int:
    """Sockets of the processors in the affinity of this process; 1 on systems that do not tell."""
    folders = [root / f"sys/devices/system/cpu/cpu{core}/topology" for core in _affinity()]
    files = [folder / "physical_package_id" for folder in folders]
    return max(1, len({file.read_text(encoding="ascii") for file in files if file.exists()}))


def trim_heap() -> None:
    """Give freed memory of the heap back to the system. glibc keeps hundreds of MiB after loading and compiling."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other libraries have no such function
    if trim is not None:
        trim(0)


def _available(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    if (free := _memory("SC_AVPHYS_PAGES")) is not None:
        return free
    if (physical := _memory("SC_PHYS_PAGES")) is not None:
        part = physical // _PART_OF_UNKNOWN
        logger.info(
            "this system does not report its free memory: %.1f GiB are taken as free, a third of all",
            part / 2**30,
        )
        return part
    raise ConfigError("free memory cannot be read on this system; set num_pages", param="num_pages")


def _memory(name: str) -> int | None:
    """Bytes of memory by a name of `sysconf`; None on a system without this name, such as macOS for free memory."""
    try:
        pages = os.sysconf(name)
    except (ValueError, OSError):
        return None
    if pages > 0:
        return pages * os.sysconf("SC_PAGE_SIZE")
    return None


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """The version and the directory of each control group of this process that may limit it, the innermost first."""
    paths = dict(_own_paths(_lines(root / "proc/self/cgroup")))
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        mount_root, mount_point = (_unescaped(field) for field in before.split(" ")[3:5])
        kind, _, options = after.split(" ")[:3]
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version is None or (version == 1 and controller not in options.split(",")):
            continue
        path = paths.get(controller if version == 1 else "")
        if path is None:
            continue
        top = root / mount_point.lstrip("/")
        # A container may see its own group alone, mounted in the place of the outermost one.
        group = top
        if Path(path).is_relative_to(mount_root):
            group = top / Path(path).relative_to(mount_root)
        while True:
            yield version, group
            if group == top:
                break
            group = group.parent


def _own_paths(lines: list[str]) -> Iterator[tuple[str, str]]:
    """The controllers and the path of each group of this process; the controller of version 2 is empty."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _left(group: Path, version: int) -> float:
    """Bytes that a group leaves for more allocations; infinity without a limit."""
    limits, usage, cached = _MEMORY_FILES[version]
    limit = min(_number(group / name) for name in limits)
    if limit >= _UNLIMITED:
        return inf
    used = _number(group / usage, default=0.0)
    stat = dict(line.partition(" ")[::2] for line in _lines(group / "memory.stat"))
    reclaimable = _float(stat.get(cached, ""), 0.0)
    return max(0.0, limit - used + min(used, reclaimable))


def _quota(group: Path, version: int) -> float:
    """Processors of a group; infinity without a limit."""
    if version == 2:
        quota, _, period = " ".join(_lines(group / "cpu.max")).partition(" ")
    else:
        quota, period = (
            " ".join(_lines(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period")
        )
    if quota.isdecimal() and period.isdecimal() and int(period):
        return int(quota) / int(period)
    return inf


def _number(path: Path, default: float = inf) -> float:
    return _float(" ".join(_lines(path)).strip(), default)


def _float(text: str, default: float) -> float:
    """The number of a text; the default for "max", -1 and others."""
    if not text.isdecimal():
        return default
    return float(text)


def _lines(path: Path) -> list[str]:
    try:
        return [
            line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line
        ]
    except OSError:
        return []


def _unescaped(field: str) -> str:
    return field.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
