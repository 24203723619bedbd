"""The start of an engine: the seconds of each phase."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

StartPhase = Literal["import", "load", "trace", "compile", "warm_up"]
"""Start of Python and imports; devices and weights; tracing and lowering; XLA; the first run of each program."""
START_PHASES: tuple[StartPhase, ...] = get_args(StartPhase)


@dataclass(frozen=True)
class StartReport:
    """The times of a start, in seconds.

    Phases may overlap, and some work belongs to none. So their sum may be more or less than the total.
    """

    seconds: dict[StartPhase, float]  # all phases; 0 for one that did not occur
    total: float
    programs: int = 0  # compiled or read from the cache
    from_cache: int = 0  # of these, read from the cache


class StartTimes:
    """Measures the phases of a start. Any thread may call it.

    A phase may run several times, and in several threads at once. Seconds in which it runs at least once count once.

    Args:
        begun: begin of the total, in seconds of `clock`; None for now. Other processes of this machine may have read
            it: the monotonic clocks of Linux and macOS are those of the system.
        clock: seconds, monotonic.
    """

    def __init__(self, begun: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock() if begun is None else begun
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(START_PHASES, 0.0)
        self._running = Counter[StartPhase]()
        self._since: dict[StartPhase, float] = {}  # of running phases
        self._programs = self._from_cache = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the begin of the total."""
        return max(0.0, self._clock() - self._begun)

    @contextmanager
    def phase(self, name: StartPhase) -> Iterator[None]:
        """Count the time of the block for a phase."""
        with self._lock:
            if not self._running[name]:
                self._since[name] = self._clock()
            self._running[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._running[name] -= 1
                if not self._running[name]:
                    self._seconds[name] += self._clock() - self._since.pop(name)

    def add(self, name: StartPhase, seconds: float) -> None:
        """Count time measured elsewhere for a phase, in addition to its blocks."""
        with self._lock:
            self._seconds[name] += seconds

    def count(self, programs: int, from_cache: int) -> None:
        """Add to the number of programs, and to the number of those read from the cache."""
        with self._lock:
            self._programs += programs
            self._from_cache += from_cache

    def report(self) -> StartReport:
        """The times up to now, those of running phases included."""
        with self._lock:
            now = self._clock()
            running = {name: now - since for name, since in self._since.items()}
            seconds = {name: self._seconds[name] + running.get(name, 0.0) for name in START_PHASES}
            return StartReport(seconds, max(0.0, now - self._begun), self._programs, self._from_cache)
