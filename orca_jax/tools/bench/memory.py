"""The memory and the processor time of a server: of its process and of all that it has started."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def resident_bytes(pid: int, *, most: bool = False) -> int:
    """Return the bytes of memory that a process and its descendants have in use; 0 on systems without /proc.

    Args:
        pid: of the process.
        most: take the most that each of them ever had. They may have had it at different times.
    """
    found = re.compile(r"^VmHWM:\s+(\d+)" if most else r"^VmRSS:\s+(\d+)", re.MULTILINE)
    sizes = [found.search(_text(_PROC / f"{each}/status")) for each in _family(pid)]
    return sum(int(size[1]) * 1024 for size in sizes if size is not None)


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process and its descendants have used; 0 on systems without /proc."""
    # The name of a process, which may hold spaces, ends with a bracket. The four times include those of ended children.
    ticks = 0
    for each in _family(pid):
        times = _text(_PROC / f"{each}/stat").rpartition(")")[2].split()[11:15]
        ticks += sum(map(int, times))
    return ticks / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> Iterator[int]:
    yield pid
    for children in _PROC.glob(f"{pid}/task/*/children"):
        for child in _text(children).split():
            yield from _family(int(child))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # the process has ended
        return ""
