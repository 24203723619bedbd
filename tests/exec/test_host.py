"""Limits of control groups, in made-up file systems."""

import logging
import os
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path

import jax
import pytest

from orca_jax.exec import cache, host
from orca_jax.exec.host import free_memory, num_processors, num_sockets
from orca_jax.values.errors import ConfigError

GIB = 2**30
V2 = "30 24 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw"
NONE_V1 = 9223372036854771712  # as the kernel writes it


def machine(root: Path, cgroup: str, mounts: str, **files: str | int) -> Path:
    """A file system with 18 GiB of available memory; `files` are named with "__" for "/"."""
    content: dict[str, str | int] = {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable: {18 * 2**20} kB\n",
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": f"24 1 8:1 / / rw - ext4 /dev/root rw\n{mounts}\n",
    }
    content |= {"sys/fs/cgroup/" + name.replace("__", "/"): text for name, text in files.items()}
    for name, text in content.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def v1(controller: str, mount_root: str = "/") -> str:
    return f"32 31 0:29 {mount_root} /sys/fs/cgroup/{controller} rw - cgroup cgroup rw,{controller}"


MEMORY = {
    "no groups": ("", "", {}, 18),
    "no limit": ("0::/a", V2, {"a__memory.max": "max", "a__memory.current": GIB}, 18),
    "a container with its own group as root": (
        "0::/",
        V2,
        {"memory.max": 2 * GIB, "memory.current": GIB // 2},
        1.5,
    ),
    "memory.high is a limit too": (
        "0::/",
        V2,
        {"memory.max": 4 * GIB, "memory.high": 3 * GIB, "memory.current": 0},
        3,
    ),
    "a limit of an outer group": (
        "0::/a/b/c",
        V2,
        {"a__b__c__memory.max": "max", "a__memory.max": 2 * GIB},
        2,
    ),
    "the least of all": (
        "0::/a/b",
        V2,
        {"a__memory.max": 9 * GIB, "a__b__memory.max": 5 * GIB, "a__memory.current": 6 * GIB},
        3,
    ),
    "cached files can be given back": (
        "0::/",
        V2,
        {
            "memory.max": 4 * GIB,
            "memory.current": 3 * GIB,
            "memory.stat": f"anon 5\ninactive_file {2 * GIB}\nfile 7",
        },
        3,
    ),
    "nothing is left": ("0::/", V2, {"memory.max": GIB, "memory.current": 2 * GIB}, 0),
    "a limit beyond the machine": ("0::/", V2, {"memory.max": 64 * GIB}, 18),
    "version 1": (
        "4:memory:/a/b\n3:cpu,cpuacct:/x",
        f"{v1('cpu')}\n{v1('memory')}",
        {
            "memory__a__b__memory.limit_in_bytes": NONE_V1,
            "memory__a__memory.limit_in_bytes": 2 * GIB,
            "memory__a__memory.usage_in_bytes": GIB,
            "memory__a__memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
            "memory__memory.limit_in_bytes": NONE_V1,
        },
        1.5,
    ),
    "version 1 in a container without a namespace": (
        "4:memory:/docker/abc",
        v1("memory", "/docker/abc"),
        {"memory__memory.limit_in_bytes": 2 * GIB},
        2,
    ),
    "a group that cannot be seen": (
        "4:memory:/lost",
        v1("memory", "/other"),
        {"memory__memory.limit_in_bytes": GIB},
        1,
    ),
    "both versions": (
        "4:memory:/a\n0::/b",
        f"{v1('memory')}\n41 31 0:37 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        {"memory__a__memory.limit_in_bytes": 3 * GIB, "unified__b__memory.max": 2 * GIB},
        2,
    ),
}


@pytest.mark.parametrize("case", MEMORY)
def test_free_memory_is_within_the_limits_of_control_groups(tmp_path: Path, case: str) -> None:
    cgroup, mounts, files, gib = MEMORY[case]
    assert free_memory(machine(tmp_path, cgroup, mounts, **files)) == int(gib * GIB)


CFS = "cpu__a__cpu.cfs_quota_us", "cpu__a__cpu.cfs_period_us"
PROCESSORS = {
    "no groups": ("", "", {}, inf),
    "no quota": ("0::/", V2, {"cpu.max": "max 100000"}, inf),
    "a part of a processor": ("0::/", V2, {"cpu.max": "50000 100000"}, 1),
    "one and a half": ("0::/a", V2, {"a__cpu.max": "max 100000", "cpu.max": "150000 100000"}, 2),
    "version 1": (
        "3:cpu,cpuacct:/a",
        v1("cpu"),
        dict.fromkeys(CFS, 100000),
        1,
    ),
    "version 1 without a quota": (
        "3:cpu:/",
        v1("cpu"),
        {"cpu__cpu.cfs_quota_us": -1, "cpu__cpu.cfs_period_us": 100000},
        inf,
    ),
    "a broken file": ("0::/", V2, {"cpu.max": "100000"}, inf),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_processors_are_within_the_quotas_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    cgroup, mounts, files, most = PROCESSORS[case]
    assert num_processors(machine(tmp_path, cgroup, mounts, **files)) == min(8, most)


def test_the_cache_is_sized_by_the_memory_of_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine(tmp_path, "0::/", V2, **{"memory.max": 2 * GIB, "memory.current": GIB})
    monkeypatch.setattr(host, "free_memory", partial(free_memory, root))

    assert cache.free_memory(jax.devices("cpu")[:1], 0.9, GIB // 2) == GIB // 4


def sysconf(**numbers: int) -> Callable[[str], int]:
    """`os.sysconf` of a system that knows these names alone."""

    def read(name: str) -> int:
        if name not in numbers:
            raise ValueError("unrecognized configuration name")
        return numbers[name]

    return read


def test_a_machine_without_proc_has_memory_and_processors(tmp_path: Path) -> None:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert (
        free / 4 < free_memory(tmp_path) < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    assert num_processors(tmp_path) == num_processors()


def test_a_mac_has_a_third_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "sysconf", sysconf(SC_PHYS_PAGES=GIB // 4096 * 24, SC_PAGE_SIZE=4096))
    with caplog.at_level(logging.INFO):
        assert free_memory(tmp_path) == 8 * GIB
    assert caplog.messages == [
        "this system does not report its free memory: 8.0 GiB are taken as free, a third of all"
    ]


@pytest.mark.parametrize("numbers", [{}, {"SC_AVPHYS_PAGES": -1, "SC_PHYS_PAGES": -1}])
def test_a_system_that_does_not_report_its_memory(
    numbers: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sysconf", sysconf(**numbers))
    with pytest.raises(ConfigError, match="set num_pages") as caught:
        free_memory(tmp_path)
    assert caught.value.param == "num_pages"


def test_this_machine_has_memory_and_processors() -> None:
    assert free_memory() > 0
    assert 1 <= num_processors() <= (os.cpu_count() or 1)


def test_sockets_are_those_of_the_affinity(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for core, socket in [(core, index % 2) for index, core in enumerate(cores)] + [(9999, 7)]:
        file = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology/physical_package_id"
        file.parent.mkdir(parents=True)
        file.write_text(f"{socket}\n")
    assert num_sockets(tmp_path) == min(2, len(cores))
    assert num_sockets(tmp_path / "nothing") == 1
