"""A retention of a class from outside."""

import logging
import time
from collections.abc import Callable
from math import inf, isnan
from typing import Any

from orca_jax.policy.errors import PolicyError, calling, number_of
from orca_jax.sched.prefixes.spans import Keeping, KeptSpan

SLOW_SECONDS = 0.01
"""A longer call is slow."""
MOST_SLOW = 16
"""Slow calls after which the class is not asked any more: requests wait for each."""
FORGOTTEN = 0.01
"""Slow calls that each other one makes good: a busy machine is slow too."""

logger = logging.getLogger(__name__)


class PolicyRetention:
    """`sched.prefixes.spans.EngineRetention` over a class from outside.

    Args:
        retention: an instance of the class.
        name: its name, for errors.
        clock: measures its calls.
    """

    def __init__(
        self, retention: Any, name: str, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.name = name
        self._retention = retention
        self._clock = clock
        self._num_slow = 0.0

    def keep(self, span: KeptSpan, now: float) -> Keeping:
        """The rank of a span with Python's own numbers.

        Raises:
            PolicyError: the class raised an exception, did not return a `Keeping` with numbers, or is too slow.
        """
        answer = self._call("keep", span, now)
        if not isinstance(answer, Keeping):
            raise self._refuse(f"keep returned {type(answer).__name__} instead of a Keeping")
        worth = number_of(answer.worth)
        seconds = number_of(answer.seconds)
        if isnan(worth) or not 0 < seconds <= inf:
            raise self._refuse(f"keep needs a number, and seconds above 0, got {answer!r}")
        return Keeping(worth, seconds)

    def used(self, span: KeptSpan, now: float) -> None:
        """Tell of a use, if the class has this method. Raises PolicyError as `keep` does."""
        if hasattr(self._retention, "used"):
            self._call("used", span, now)

    def lost(self, span: KeptSpan, now: float) -> None:
        """Tell of a loss, if the class has this method. Raises PolicyError as `keep` does."""
        if hasattr(self._retention, "lost"):
            self._call("lost", span, now)

    def _call(self, method: str, span: KeptSpan, now: float) -> object:
        begin = self._clock()
        with calling(self.name, method):
            answer: object = getattr(self._retention, method)(span, now)
        if self._clock() - begin <= SLOW_SECONDS:
            self._num_slow = max(0.0, self._num_slow - FORGOTTEN)
            return answer
        self._num_slow += 1
        if self._num_slow >= MOST_SLOW:
            raise self._refuse(f"{MOST_SLOW} calls took more than {1e3 * SLOW_SECONDS:.0f} ms")
        return answer

    def _refuse(self, problem: str) -> PolicyError:
        return PolicyError(self.name, problem)
