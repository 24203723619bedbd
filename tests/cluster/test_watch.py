"""The leader's judgement: silence, stillness and divergence, each with the name of the worker."""

import pytest

from orca_jax.cluster.digest import Digests
from orca_jax.cluster.messages import Report, WorkerBeat
from orca_jax.cluster.watch import WorkerWatch
from orca_jax.values.startup import LOADING_SILENCE

TIMEOUT = 5.0


@pytest.fixture
def watch() -> WorkerWatch:
    made = WorkerWatch(["worker 1", "worker 2"], TIMEOUT)
    made.serves()
    return made


def beat(begun: int, done: int, still: float = 0.0, place: str = "") -> WorkerBeat:
    return WorkerBeat(begun, done, still, TIMEOUT, place)


def test_silence_is_counted_between_messages(watch: WorkerWatch) -> None:
    assert watch.verdict(3) is None
    watch.hear(1)
    assert watch.verdict(1.9) is None
    reason = watch.verdict(0.2)
    assert reason == "worker 2 has sent nothing for 5 s (--control-timeout)"


def test_a_loading_worker_may_be_silent_for_longer() -> None:
    loading = WorkerWatch(["worker 1"], TIMEOUT)
    assert loading.verdict(LOADING_SILENCE - 1) is None
    assert loading.verdict(2) is not None


def test_the_worker_behind_the_others_is_stuck(watch: WorkerWatch) -> None:
    """The devices of all processes wait for its part, so each of them stands still."""
    watch.num_sent = 8
    watch.take_beat(1, beat(8, 7, 5.1))
    watch.take_beat(2, beat(7, 7, 4.9, "exec/pack.py:pack"))
    assert (
        watch.verdict(0.1) == "worker 2 is stuck: it made no progress for 5 s in exec/pack.py:pack"
    )


def test_a_still_device_is_no_workers_fault(watch: WorkerWatch) -> None:
    watch.num_sent = 8
    for rank in (1, 2):
        watch.take_beat(rank, beat(8, 7, 5.1))
    assert (
        watch.verdict(0.1)
        == "the devices made no progress for 5 s: all processes wait for iteration 7"
    )


def test_progress_within_the_limit(watch: WorkerWatch) -> None:
    for rank in (1, 2):
        watch.take_beat(rank, beat(7, 7, 4.9))
    assert watch.verdict(0.1) is None


def test_digests_are_compared_in_any_order_of_arrival(watch: WorkerWatch) -> None:
    watch.take_report(1, Report(0, Digests(11, 11)))  # before the leader's own
    assert watch.verdict(0.1) is None
    watch.own(0, Digests(11, 11))
    watch.own(1, Digests(12, 12))
    watch.take_report(2, Report(0, Digests(11, 11)))
    watch.take_report(1, Report(1, Digests(12, 12)))
    assert watch.verdict(0.1) is None
    watch.take_report(2, Report(1, Digests(13, 13)))
    assert (
        watch.verdict(0.1) == "worker 2 has diverged: its plan or its tokens of iteration 1 differ"
    )


def test_a_worker_without_results_is_compared_by_its_calls(watch: WorkerWatch) -> None:
    watch.own(0, Digests(11, 5))
    watch.take_report(1, Report(0, Digests(11, None)))
    watch.take_report(2, Report(0, Digests(11, 5)))
    assert watch.verdict(0.1) is None
    watch.own(1, Digests(12, 6))
    watch.take_report(1, Report(1, Digests(13, None)))
    assert (
        watch.verdict(0.1) == "worker 1 has diverged: its plan or its tokens of iteration 1 differ"
    )
