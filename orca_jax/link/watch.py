"""Watches over a process: a thread without progress, threads without a processor, and the memory of an engine."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from glob import glob
from pathlib import Path
from types import FrameType

# seconds that one look may add: a process that was stopped is not to blame for more
LONGEST_BEAT = 1.0
QUIET_SECONDS = 1.0  # without progress, until a look reads more than the counters
STEP_FLOOR = 10.0  # seconds without progress that every engine may take
STEP_FACTOR = 30.0  # times the measured time of the launches in flight
COMPILE_SECONDS = 600.0  # for a program that is compiled while serving

_ROOT = Path("/")
_PACKAGE = str(Path(__file__).parents[1])
_COMPILER = "/jax/_src/compiler.py"


class ProgressWatch:
    """Measures the time for which a counter has stood still.

    A busy machine is not a hang. If a thread of the process was ready to run and had no processor, this time does not
    count. Neither does the time during which this process, which looks, was stopped.

    Args:
        clock: seconds, monotonic.
        starved: total seconds, since any start, during which a thread was ready and had no processor, by thread.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        starved: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        self._clock = clock
        self._starved = starved or StarvedThreads("self").seconds
        self._last = clock()
        self._progress: int | None = None
        self._still = 0.0
        self._before: dict[str, float] | None = None  # starvation at the last look

    def look(self, progress: int | None) -> float:
        """The seconds without progress; `progress` is a counter, or None for a thread without work."""
        now = self._clock()
        passed = min(now - self._last, LONGEST_BEAT)
        self._last = now
        if progress is None or progress != self._progress:
            self._progress = progress
            self._still = 0.0
            self._before = None
            return 0.0
        if self._still + passed >= QUIET_SECONDS:
            before = self._before
            self._before = self._starved()
            if before is not None:
                passed -= max(
                    (total - before.get(name, total) for name, total in self._before.items()),
                    default=0.0,
                )
        self._still += max(0.0, passed)
        return self._still


class StarvedThreads:
    """Reads for how long each thread of a process was ready to run and had no processor (Linux).

    The kernel adds a wait to its counter when the wait ends. A wait that goes on shows in the thread's state: it is
    ready, and its counters stand still. So the process has to be asked again and again.

    Args:
        pid: the process: a number, or "self".
        clock: seconds, monotonic.
    """

    def __init__(self, pid: int | str, clock: Callable[[], float] = time.monotonic) -> None:
        self._pattern = f"/proc/{pid}/task/*/schedstat"
        self._clock = clock
        # of ready threads: the counters, and the first look with them
        self._ready: dict[str, tuple[str, float]] = {}

    def seconds(self) -> dict[str, float]:
        """Total seconds of each thread since its begin; empty if not known."""
        found = {}
        ready = {}
        now = self._clock()
        for path in glob(self._pattern):
            try:
                counters = Path(path).read_text("ascii")
                found[path] = int(counters.split()[1]) / 1e9
                if (
                    Path(path)
                    .with_name("stat")
                    .read_text("utf-8", "replace")
                    .rpartition(")")[2]
                    .split()[0]
                    != "R"
                ):
                    continue
            # the thread has ended, or the kernel does not count
            except (OSError, ValueError, IndexError):
                continue
            before, since = self._ready.get(path, (counters, now))
            ready[path] = counters, since if before == counters else now
            found[path] += now - ready[path][1]
        self._ready = ready
        return found


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
        # it has ended, or the system does not tell
        with contextlib.suppress(OSError, ValueError, IndexError):
            self._resident = int(self._pages.read_text("ascii").split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )

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


def step_limit(expected: float) -> float:
    """The seconds without progress after which an engine counts as hung.

    Args:
        expected: measured seconds of the launches in flight.
    """
    return max(STEP_FLOOR, STEP_FACTOR * expected)


def limit_and_place(limit: float, still: float, thread: int) -> tuple[float, str]:
    """The limit of a thread without progress, and its place, see `place_of`.

    In the first `QUIET_SECONDS` the place is not looked up, and empty.

    Args:
        limit: seconds without progress that the thread may take, unless JAX compiles.
        still: seconds without progress so far.
        thread: its identifier.
    """
    if still <= QUIET_SECONDS:
        return limit, ""
    place, is_compiling = place_of(thread)
    return (max(limit, COMPILE_SECONDS) if is_compiling else limit), place


def place_of(thread: int) -> tuple[str, bool]:
    """The innermost function of this package that a thread runs, as `file.py:function`, and True if JAX compiles."""
    frame: FrameType | None = sys._current_frames().get(thread)
    place, compiles = "", False
    while frame is not None and not place:
        name = frame.f_code.co_filename
        compiles = compiles or name.replace("\\", "/").endswith(_COMPILER)
        if name.startswith(_PACKAGE):
            place = f"{Path(name).relative_to(_PACKAGE).as_posix()}:{frame.f_code.co_name}"
        frame = frame.f_back
    return place, compiles
