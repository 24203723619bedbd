"""Arrivals at random: their rate, their bursts, and what a seed keeps."""

import math
from itertools import islice, pairwise
from statistics import mean, stdev

import pytest

from orca_jax.tools.bench.online.load import arrival_times


def gaps(rate: float, burstiness: float, seed: int = 0, count: int = 4001) -> list[float]:
    return [
        later - earlier
        for earlier, later in pairwise(islice(arrival_times(rate, burstiness, seed), count))
    ]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float) -> None:
    drawn = gaps(5.0, burstiness)
    assert mean(drawn) == pytest.approx(1 / 5, rel=0.1)
    assert stdev(drawn) / mean(drawn) == pytest.approx(burstiness**-0.5, rel=0.1), (
        "1 for a Poisson process"
    )


def test_limits() -> None:
    assert list(islice(arrival_times(math.inf, 1.0, 0), 3)) == [0, 0, 0]
    assert list(islice(arrival_times(4.0, math.inf, 0), 3)) == [0, 0.25, 0.5]


def test_a_seed_gives_one_pattern_at_every_rate() -> None:
    slow, fast = gaps(1.0, 1.0, count=20), gaps(10.0, 1.0, count=20)
    assert slow == pytest.approx([10 * gap for gap in fast])
    assert slow != gaps(1.0, 1.0, seed=1, count=20)
