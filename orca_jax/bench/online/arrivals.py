"""Arrival times drawn at random: a Poisson process, or one with more or fewer bursts."""

import math
import random
from collections.abc import Iterator
from itertools import count


def arrival_times(rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Yield arrival times in seconds without end, in order; the first one is 0.

    The gaps follow a gamma distribution, as in `vllm bench serve`. Equal seeds give the same pattern at every rate.

    Args:
        rate: requests per second; infinite: all at once.
        burstiness: shape of the distribution. 1: a Poisson process; below 1: bursts; infinite: equal gaps.
        seed: seed of the gaps.
    """
    if math.isinf(rate):
        yield from (0.0 for _ in count())
    if math.isinf(burstiness):
        yield from (index / rate for index in count())
    gaps = random.Random(f"arrivals-{seed}")
    now = 0.0
    while True:
        yield now
        now += gaps.gammavariate(burstiness, 1 / (rate * burstiness))
