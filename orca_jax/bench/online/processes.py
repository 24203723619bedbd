"""Which core a process runs on and what it has used of it, from Linux's /proc; elsewhere nothing is known."""

import os
from pathlib import Path

_PROC = Path("/proc")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far, in steps of 10 ms; 0 where that is not known."""
    try:
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    lists = (_PROC / str(pid) / "task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text().split()]


def pin(pid: int, cores: set[int]) -> None:
    """Keep all threads of a process on some cores, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        for task in (_PROC / str(pid) / "task").iterdir():
            os.sched_setaffinity(int(task.name), cores)


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
