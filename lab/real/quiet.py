"""Runs on a quiet machine: each notes the load and the stolen time, and is repeated if others disturbed it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

ATTEMPTS = 3
_TICK = 1.0  # seconds between two readings of the load


@dataclass
class Quiet:
    """A watch over the load of the machine, for all runs of a command.

    Args:
        most_load: load average of a minute, above which a run is repeated; one more than the cores.
        patience: seconds for the load to fall before runs begin, in all.
    """

    most_load: float = (os.cpu_count() or 1) + 1.0
    patience: float = 300.0

    def run_quietly[T](self, work: Callable[[], T]) -> tuple[T, dict[str, Any]]:
        """Run until the load is low enough, at most `ATTEMPTS` times; keep the attempt with the lowest load.

        Returns:
            The result, and `load_average` at its end, `steal`, the share of the processors' time that other guests of
            the host took meanwhile (None outside of Linux), and the number of `attempts`.
        """
        attempts: list[tuple[float, float | None, T]] = []
        while len(attempts) < ATTEMPTS:
            self._calm_down()
            before = _jiffies()
            result = work()
            attempts.append((os.getloadavg()[0], _steal(before, _jiffies()), result))
            if attempts[-1][0] <= self.most_load:
                break
        load, steal, result = min(attempts, key=lambda each: each[0])
        return result, {"load_average": load, "steal": steal, "attempts": len(attempts)}

    def _calm_down(self) -> None:
        while self.patience > 0 and os.getloadavg()[0] > self.most_load:
            time.sleep(_TICK)
            self.patience -= _TICK


def _jiffies() -> tuple[int, int] | None:
    """The stolen time and all time of the processors since the machine's start; None outside of Linux."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            times = [int(each) for each in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return times[7], sum(times)


def _steal(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None:
        return None
    return (after[0] - before[0]) / max(1, after[1] - before[1])
