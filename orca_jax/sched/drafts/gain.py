"""The number of proposals of an iteration: as many as give the most tokens per second.

A proposal costs the time that the iteration takes longer. A device that waits for its memory verifies some tokens for
nothing; a busy one computes each of them. So the times of iterations are measured, by their number of tokens.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

_NEWEST = 0.15  # weight of the newest measurement
_LONGEST = 2.0  # a measurement above this multiple of the known time counts as this multiple


class IterationTimes:
    """Seconds from one iteration to the next by padded tokens: measured while serving, and before that at start.

    Iterations that wait for their tokens are apart from those selected while another one runs.

    Args:
        launches: seconds of a launch of each bucket, measured at start; empty: all iterations take equally long.
    """

    def __init__(self, launches: Mapping[int, float]) -> None:
        self.buckets = tuple(sorted(launches))
        self._seconds = {waits: dict(launches) for waits in (False, True)}

    def of(self, num_tokens: int, *, waits: bool) -> float:
        """Expected seconds of an iteration. Those beyond the largest bucket have several launches."""
        if not self.buckets:
            return 1.0
        known, largest = self._seconds[waits], self.buckets[-1]
        full, rest = divmod(num_tokens, largest)
        return full * known[largest] + (known[self.buckets[bisect_left(self.buckets, rest)]] if rest else 0.0)

    def add(self, num_tokens: int, seconds: float, *, waits: bool) -> None:
        """Take a measured time."""
        if not self.buckets or num_tokens > self.buckets[-1]:
            return
        known, bucket = self._seconds[waits], self.buckets[bisect_left(self.buckets, num_tokens)]
        known[bucket] += _NEWEST * (min(seconds, _LONGEST * known[bucket]) - known[bucket])

    def steps(self, num_tokens: int, most: int) -> Iterator[int]:
        """Numbers of further tokens, at most `most`, that fill the buckets from `num_tokens` on; and `most`."""
        for bucket in self.buckets[bisect_left(self.buckets, num_tokens) :]:
            if num_tokens < bucket < num_tokens + most:
                yield bucket - num_tokens
        yield most


class Share(NamedTuple):
    """A number of proposals, and the tokens per second with them relative to those without."""

    count: int
    gain: float


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
        times: of iterations.
        num_tokens: tokens of the iteration without proposals.
        num_draws: of these, those with a token drawn after them.
        chances: that each proposal is accepted, in descending order.
        per_round: seconds to propose one more id for all requests.
        rounds: for each of `chances`, the place of the id in its proposal, from 1 on.
    """
    best = Share(0, 0.0)
    before = num_draws / times.of(num_tokens, waits=False)
    expected, done, longest = float(num_draws), 0, 0
    for count in times.steps(num_tokens, len(chances)):
        expected += sum(chances[done:count])
        longest = max([longest, *rounds[done:count]])
        done = count
        seconds = times.of(num_tokens + count, waits=True) + per_round * longest
        gain = expected / seconds / before
        if gain > best.gain:
            best = Share(count, gain)
    return best
