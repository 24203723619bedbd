"""The phases of a start, with a clock moved by the test."""

import threading

import pytest

from orca_jax.build.engine import build_engine
from orca_jax.config import EngineConfig
from orca_jax.startup import START_PHASES, StartTimes


class MovedClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> MovedClock:
    return MovedClock()


def test_phases_are_summed_and_the_total_is_separate(clock: MovedClock) -> None:
    times = StartTimes(90.0, clock)
    times.add("import", times.elapsed)
    for seconds in (2, 3):
        with times.phase("load"):
            clock.now += seconds
        clock.now += 10  # in no phase
    with pytest.raises(KeyError), times.phase("trace"):
        clock.now += 1
        raise KeyError
    times.count(16, 12)
    times.count(1, 0)
    report = times.report()
    assert report.seconds == {"import": 10, "load": 5, "trace": 1, "compile": 0, "warm_up": 0}
    assert tuple(report.seconds) == START_PHASES
    assert (report.total, report.programs, report.from_cache) == (36, 17, 12)


def test_phases_overlap(clock: MovedClock) -> None:
    times = StartTimes(clock=clock)
    with times.phase("compile"), times.phase("load"):
        clock.now += 4
        with times.phase("compile"):  # as in a second thread
            clock.now += 1
    assert times.report().seconds == {"import": 0, "load": 5, "trace": 0, "compile": 5, "warm_up": 0}


def test_a_running_phase_counts_up_to_now(clock: MovedClock) -> None:
    times = StartTimes(clock=clock)
    with times.phase("compile"):
        clock.now += 3
        assert times.report().seconds["compile"] == 3
        clock.now += 1
    assert times.report().seconds["compile"] == 4


def test_threads_share_a_phase(clock: MovedClock) -> None:
    times = StartTimes(clock=clock)
    together = threading.Barrier(9)

    def work() -> None:
        for _ in range(200):
            with times.phase("compile"):
                times.count(1, 1)
        with times.phase("compile"):
            together.wait(10)  # all are in it
            together.wait(10)  # the clock has moved

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    together.wait(10)
    clock.now += 7
    together.wait(10)
    for thread in threads:
        thread.join(10)
    report = times.report()
    assert (report.seconds["compile"], report.programs, report.from_cache) == (7, 1600, 1600)


def test_the_total_begins_in_another_process() -> None:
    built = build_engine(EngineConfig(model="preset:toy"), times=StartTimes(StartTimes()._clock() - 50))
    assert 50 <= built.start.total < 80
    assert (built.start.programs, built.start.seconds["compile"]) == (0, 0)
