"""The requests of each run: as many as a budget of seconds allows, by the throughput measured at saturation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST_REQUESTS = 112
"""Of a run: 11 for the warm-up, and a median of 101."""
MOST_REQUESTS = 300
SHARE = 0.85
"""Of the budget for planned runs. The last requests of a run take longer than planned."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of a system at a multiple of its saturation."""

    system: str
    load: float
    weight: float = 1.0  # seconds of this run for each second of a usual one
    least: int = LEAST_REQUESTS

    def seconds(self, count: int, saturation: float) -> float:
        """Expected seconds for this many requests: until the last arrival, or until all are served if that is later."""
        return count / (saturation * min(self.load, 1.0))

    def requests(self, seconds: float, saturation: float) -> int:
        """The requests for about this many seconds."""
        count = round(self.weight * seconds * saturation * min(self.load, 1.0))
        return min(max(count, self.least), round(self.weight * MOST_REQUESTS))


def seconds_of_a_run(
    runs: Sequence[PlannedRun], saturations: Mapping[str, float], seconds: float
) -> float:
    """The seconds of a usual run with which all runs together take about `seconds`, and at least a second."""
    low = 1.0
    high = max(1.0, seconds)
    for _ in range(30):
        middle = (low + high) / 2
        planned = [
            run.seconds(run.requests(middle, saturations[run.system]), saturations[run.system])
            for run in runs
        ]
        if sum(planned) <= SHARE * seconds:
            low = middle
        else:
            high = middle
    return low
