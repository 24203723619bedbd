"""The device's idle time, by hand: a device is an end time, and only the tests move the clock."""

from typing import Any

import pytest

from orca_jax.exec.results import IdleWatch
from orca_jax.sim.toy import ToyExecutor
from orca_jax.values.step import Member, StepPlan
from tests.sampling import row_sampling


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Result:
    """A result, ready at a given time."""

    def __init__(self, clock: Clock, end: float) -> None:
        self._clock, self._end = clock, end

    def is_ready(self) -> bool:
        return self._clock.now >= self._end

    def block_until_ready(self) -> None:
        self._clock.now = max(self._clock.now, self._end)


def hand_over(watch: IdleWatch, clock: Clock, end: float) -> Any:
    watch.begin()
    result: Any = Result(clock, end)
    watch.handed_over(result)
    return result


def test_one_at_a_time_is_exact() -> None:
    clock = Clock()
    watch = IdleWatch(clock)
    clock.now = 7
    watch.wait(hand_over(watch, clock, 10))
    clock.now += 2
    hand_over(watch, clock, 20)
    assert watch.seconds == 2


def test_a_device_with_more_to_do_is_not_idle() -> None:
    clock = Clock()
    watch = IdleWatch(clock)
    first = hand_over(watch, clock, 10)
    second = hand_over(watch, clock, 20)
    watch.wait(first)
    clock.now = 19
    third = hand_over(watch, clock, 30)
    watch.wait(second)
    watch.wait(third)
    assert (clock.now, watch.seconds) == (30, 0)


def test_a_wait_of_another_thread_counts() -> None:
    """Done at 10, seen so at once by the other thread, and collected at 13."""
    clock = Clock()
    watch = IdleWatch(clock)
    result = hand_over(watch, clock, 10)
    clock.now = 13
    watch.wait(result, ready_at=10.0)
    hand_over(watch, clock, 20)
    assert watch.seconds == 3


@pytest.mark.parametrize(("looks_at", "most"), [(None, 7), (13, 4), (16, 7)])
def test_without_waits_the_sum_is_a_bound(looks_at: float | None, most: float) -> None:
    """Done at 15, seen busy at 10 or 13, and used again at 17: 2 idle seconds."""
    clock = Clock()
    watch = IdleWatch(clock)
    first = hand_over(watch, clock, 10)
    hand_over(watch, clock, 15)
    watch.wait(first)
    if looks_at is not None:
        clock.now = looks_at
        watch.look()
    clock.now = 17
    hand_over(watch, clock, 30)
    assert watch.seconds == most


def test_rest_does_not_count() -> None:
    clock = Clock()
    watch = IdleWatch(clock)
    watch.wait(hand_over(watch, clock, 10))
    watch.rest()
    clock.now = 1000
    watch.wait(hand_over(watch, clock, 1010))
    clock.now += 3
    hand_over(watch, clock, 2000)
    assert watch.seconds == 3


def test_the_toy_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("orca_jax.sim.toy.time.perf_counter", clock)
    toy = ToyExecutor(7, num_blocks=(4,), page_size=4, num_rows=1, latency=10.0)
    sampling = row_sampling(num_prompt=1)
    toy.submit(
        StepPlan(
            0, (Member("a", 0, 0, [1], is_sampling=True, new_blocks=((0,),), sampling=sampling),)
        )
    )
    clock.now = 4  # still busy
    toy.submit(
        StepPlan(
            1, (Member("a", 0, 1, [], is_sampling=True, last_on_device=True, num_old_blocks=1),)
        )
    )
    clock.now = 25  # done at 20
    toy.submit(
        StepPlan(
            2, (Member("a", 0, 2, [], is_sampling=True, last_on_device=True, num_old_blocks=1),)
        )
    )
    assert toy.stats.idle_seconds == 5
    toy.rest()
    clock.now = 99
    toy.submit(
        StepPlan(
            3, (Member("a", 0, 3, [], is_sampling=True, last_on_device=True, num_old_blocks=1),)
        )
    )
    assert toy.stats.idle_seconds == 5
