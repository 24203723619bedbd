"""The number of proposals of an iteration: as many as give the most tokens per second.

A proposal costs the time that the iteration takes longer. A device that waits for its memory verifies some tokens for
nothing; a busy one computes each of them. So the times of iterations are measured, by their number of tokens.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

_NEWEST = 0.15  # least weight of the newest measurement
_LONGEST = 2.0  # a measurement above this multiple of the known time counts as this multiple


class _Mean:
    """A moving average, at first of all values."""

    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.value, self.count = 1.0, 0

    def add(self, value: float) -> None:
        self.count += 1
        if self.count > 1:
            value = min(value, _LONGEST * self.value)
        self.value += max(_NEWEST, 1 / self.count) * (value - self.value)


class IterationTimes:
    """Seconds from one iteration to the next, by padded tokens.

    Measured times count first. The times of other sizes have the proportions measured at start, when the machine may
    have been slower or faster than now. Iterations that wait for their tokens are apart from those selected while
    another one runs.

    Args:
        launches: seconds of a launch of each bucket, measured at start; empty: all iterations take equally long.
    """

    def __init__(self, launches: Mapping[int, float]) -> None:
        self.buckets = tuple(sorted(launches))
        # A larger launch is never faster; a measurement that says so was disturbed.
        self._shape: dict[int, float] = {}
        least = inf
        for size in reversed(self.buckets):
            least = min(least, launches[size])
            self._shape[size] = least
        self._level = _Mean()
        self._measured: dict[tuple[int, bool], _Mean] = {}

    def of(self, num_tokens: int, *, waits: bool) -> float:
        """Expected seconds of an iteration. Those beyond the largest bucket have several launches."""
        if not self.buckets:
            return 1.0
        largest = self.buckets[-1]
        full, rest = divmod(num_tokens, largest)
        return full * self._of_bucket(largest, waits) + (
            self._of_bucket(self._bucket(rest), waits) if rest else 0.0
        )

    def add_time(self, num_tokens: int, seconds: float, *, waits: bool) -> None:
        """Take a measured time."""
        if not self.buckets or num_tokens > self.buckets[-1]:
            return
        bucket = self._bucket(num_tokens)
        self._measured.setdefault((bucket, waits), _Mean()).add(seconds)
        self._level.add(seconds / self._shape[bucket])

    def is_measured(self, num_tokens: int, *, waits: bool) -> bool:
        """True if the time of an iteration is known from iterations, or if it does not matter."""
        if not self.buckets or num_tokens > self.buckets[-1]:
            return True
        return (self._bucket(num_tokens), waits) in self._measured

    def steps(self, num_tokens: int, most: int) -> Iterator[int]:
        """Numbers of further tokens, at most `most`, that fill the buckets from `num_tokens` on; and `most`."""
        for bucket in self.buckets[bisect_left(self.buckets, num_tokens) :]:
            if num_tokens < bucket < num_tokens + most:
                yield bucket - num_tokens
        yield most

    def _bucket(self, num_tokens: int) -> int:
        return self.buckets[bisect_left(self.buckets, num_tokens)]

    def _of_bucket(self, bucket: int, waits: bool) -> float:
        measured = self._measured.get((bucket, waits))
        if measured is None:
            return self._level.value * self._shape[bucket]
        return measured.value


class Share(NamedTuple):
    """A number of proposed ids."""

    number: int
    gain: float  # tokens per second, relative to those without proposals
    most: int = 0  # as many as possible
    most_tokens: float = 1.0  # tokens of an iteration with that many, relative to none
    most_seconds: float = 1.0  # seconds of an iteration with that many, relative to none


NO_GAIN = Share(0, 1.0)


def best_share(
    times: IterationTimes,
    num_tokens: int,
    num_draws: int,
    chances: Sequence[float],
    *,
    per_round: float = 0.0,
    rounds: Sequence[int] = (),
) -> Share:
    """The number of proposals with the most tokens per second.

    Args:
        times: the times of iterations.
        num_tokens: tokens of the iteration without proposals.
        num_draws: the number of those tokens after which a token is drawn.
        chances: that each proposal is accepted, in descending order.
        per_round: seconds to propose one more id for all requests.
        rounds: the place, for each of `chances`, of the id in its proposal, from 1 on.
    """
    best = Share(0, 0.0)
    alone = times.of(num_tokens, waits=False)
    before = num_draws / alone
    expected = float(num_draws)
    seconds = alone
    done = 0
    longest = 0
    for count in times.steps(num_tokens, len(chances)):
        expected += sum(chances[done:count])
        longest = max([longest, *rounds[done:count]])
        done = count
        seconds = times.of(num_tokens + count, waits=True) + per_round * longest
        gain = expected / seconds / before
        if gain > best.gain:
            best = Share(count, gain)
    return best._replace(
        most=len(chances),
        most_tokens=expected / num_draws,
        most_seconds=seconds / alone,
    )
