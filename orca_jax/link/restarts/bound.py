"""The bound on failures: the pause before the next start, and the most ends."""

import time
from collections import deque

MAX_FAILURES = 5  # within FAILURE_WINDOW; then nothing is started any more
FAILURE_WINDOW = 300.0  # seconds
# seconds between an end and the next start; doubles each time
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0


class FailureCount:
    """A counter of successive ends of processes."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque()  # times

    def pause(self) -> float | None:
        """Count an end. Returns the seconds to wait before the next start; None after too many ends."""
        now = time.monotonic()
        self._ends.append(now)
        while self._ends[0] < now - FAILURE_WINDOW:
            self._ends.popleft()
        count = len(self._ends)
        if count >= MAX_FAILURES:
            return None
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (count - 1))
