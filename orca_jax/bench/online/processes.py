"""Cores and processor time of processes, from /proc of Linux; other systems report nothing."""

import os
from pathlib import Path

_PROC = Path("/proc")


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process so far, in steps of 10 ms, or 0 if it is unknown."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    lists = (_PROC / str(pid) / "task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def pin(pid: int, cores: set[int]) -> None:
    """Restrict all threads of a process to some cores, if the system supports it."""
    if hasattr(os, "sched_setaffinity"):
        for task in (_PROC / str(pid) / "task").iterdir():
            os.sched_setaffinity(int(task.name), cores)


def cores() -> list[int]:
    """Return the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
