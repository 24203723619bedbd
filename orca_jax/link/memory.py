"""The memory of an engine process, and its end by the kernel for lack of memory (Linux)."""

import contextlib
import os
from pathlib import Path

_ROOT = Path("/")


class MemoryWatch:
    """Remembers the memory of a process, since the kernel forgets it with the process.

    Args:
        pid: the process.
        root: replaces the root of the file system in tests.
    """

    def __init__(self, pid: int, root: Path = _ROOT) -> None:
        self._pages = root / f"proc/{pid}/statm"
        self._counters = root / "proc/vmstat"
        self._num_kills = self._read_kills()
        self._resident = 0  # bytes, at the last look

    def look(self) -> None:
        """Note the memory that the process holds now."""
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended, or the system does not tell
            self._resident = int(self._pages.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def reason(self) -> str | None:
        """The reason of an end by SIGKILL, if the kernel has killed a process for lack of memory since the start."""
        if self._num_kills is None or self._read_kills() == self._num_kills:
            return None
        return (
            f"was killed by the kernel for lack of memory; it held {self._resident / 2**30:.1f} GiB. Lower --num-pages "
            "(the KV cache) or --max-num-batched-tokens, choose a smaller model or --quantization, or raise the memory "
            "limit of the container"
        )

    def _read_kills(self) -> int | None:
        """Processes killed by the kernel for lack of memory, in any control group; None if it is not known."""
        try:
            lines = self._counters.read_text("ascii").splitlines()
        except OSError:
            return None
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
