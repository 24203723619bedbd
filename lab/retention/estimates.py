"""Estimates of the time to the next use of pages, by what was seen so far."""

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence


class Gaps:
    """The latest gaps between two uses, in seconds.

    Args:
        most: gaps that count; older ones are forgotten.
    """

    def __init__(self, most: int = 200) -> None:
        self._latest = deque[float]()
        self._sorted: list[float] = []
        self._most = most

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, seconds: float) -> None:
        """Count a gap."""
        self._latest.append(seconds)
        insort(self._sorted, seconds)
        if len(self._latest) > self._most:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]

    def share_up_to(self, seconds: float) -> float:
        """The share of the gaps that are not longer."""
        return bisect_right(self._sorted, seconds) / len(self._sorted)

    def quantile(self, share: float) -> float:
        """The gap that this share of them does not exceed."""
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]

    @property
    def values(self) -> Sequence[float]:
        """The gaps, the shortest first."""
        return self._sorted


class LogNormal:
    """A log-normal distribution of gaps, whose mean and variance follow the latest ones.

    Args:
        median: seconds, before the first gap.
        rate: weight of the newest gap.
    """

    def __init__(self, median: float, rate: float = 0.05) -> None:
        self._mean = math.log(median)
        self._variance = 1.0
        self._rate = rate

    def add(self, seconds: float) -> None:
        """Count a gap."""
        distance = math.log(max(seconds, 1e-3)) - self._mean
        self._mean += self._rate * distance
        self._variance += self._rate * (distance**2 - self._variance)

    def share_up_to(self, seconds: float) -> float:
        """The chance of a gap that is not longer."""
        if seconds <= 0:
            return 0.0
        spread = math.sqrt(2 * max(self._variance, 1e-4))
        return 0.5 * (1 + math.erf((math.log(seconds) - self._mean) / spread))

    def chance_within(self, seconds: float, age: float) -> float:
        """The chance of a use in the next seconds, if there was none up to an age."""
        left = 1 - self.share_up_to(age)
        if left < 1e-9:
            return 0.0
        return (self.share_up_to(age + seconds) - self.share_up_to(age)) / left


class Average:
    """A mean that follows the latest values.

    Args:
        value: before the first one.
        rate: weight of the newest value.
    """

    def __init__(self, value: float, rate: float = 0.1) -> None:
        self.value = value
        self._rate = rate

    def add(self, value: float) -> None:
        """Count a value."""
        self.value += self._rate * (value - self.value)
