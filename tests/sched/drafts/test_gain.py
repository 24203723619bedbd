"""The number of proposals follows from measured times and from chances."""

import pytest

from orca_jax.sched.drafts.gain import IterationTimes, best_share

FLAT = {1: 0.010, 4: 0.011, 8: 0.012, 16: 0.020, 32: 0.040}


@pytest.mark.parametrize(
    ("num_draws", "chances", "number"),
    [
        (1, [0.9, 0.8, 0.7, 0.6], 4),
        (1, [0.05] * 4, 0),  # 1.2 tokens in 1.1 or 1.2 of the time: nothing worth a word
        (8, [0.9] * 8, 8),
        (16, [0.3] * 16, 0),  # twice the time for 1.3 times the tokens
    ],
)
def test_best_share(num_draws: int, chances: list[float], number: int) -> None:
    share = best_share(IterationTimes(FLAT), num_draws, num_draws, chances)
    assert (share.number if share.gain > 1.05 else 0) == number
    assert share.most == len(chances)


def test_rounds_of_a_proposer_count() -> None:
    times = IterationTimes(FLAT)
    free = best_share(times, 1, 1, [0.9, 0.8, 0.7])
    paid = best_share(times, 1, 1, [0.9, 0.8, 0.7], per_round=0.01, rounds=[1, 2, 3])
    assert free.gain > 2.5 > 1.1 > paid.gain


def test_measured_times_move_those_of_other_sizes() -> None:
    """The machine was ten times slower at start; a size that seemed slower than a larger one was disturbed."""
    times = IterationTimes({**FLAT, 4: 1.0})
    assert times.of(4, waits=True) == FLAT[8]
    for _ in range(20):
        times.add_time(1, 0.001, waits=False)
    assert times.of(1, waits=False) == pytest.approx(0.001)
    assert times.of(8, waits=True) == pytest.approx(0.0012)
    times.add_time(8, 0.002, waits=True)
    assert times.of(8, waits=True) == pytest.approx(0.002)
    times.add_time(1, 60.0, waits=False)
    assert times.of(1, waits=False) < 0.0012, "one disturbed measurement changes little"


def test_without_launches_proposals_cost_nothing() -> None:
    assert best_share(IterationTimes({}), 4, 4, [0.01] * 3).number == 3
