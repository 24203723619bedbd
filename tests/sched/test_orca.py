"""Iteration-level scheduling by table: the members of each iteration."""

from collections.abc import Iterator

import pytest

from orca_jax.engine import Engine
from orca_jax.sched.kv import KVManager
from orca_jax.sched.orca import OrcaScheduler
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request
from orca_jax.sim.toy import ToyExecutor
from orca_jax.values.request import SamplingParams
from tests.sched.lab import Lab


def test_early_finished_and_late_joining() -> None:
    """The requests of the paper's Figure 3, as iteration-level scheduling serves them (section 3.1, S1)."""
    lab = Lab(max_bs=2)
    lab.add("A", 2, 4)  # "I think" -> "this is great", end
    lab.add("B", 2, 2)  # "I love" -> "you", end
    lab.step()
    lab.add("C", 3, 2)  # joins as soon as B has left
    lab.run()
    assert lab.batches == ["A2 B2", "A1 B1", "A1 C3", "A1 C1"]
    assert lab.returned == ["", "B", "", "AC"]


def test_figures_4_and_5() -> None:
    """Two requests in the increment phase and two new ones with 2 and 3 tokens: one batch of 7 tokens."""
    lab = Lab(max_bs=4)
    lab.add("A", 2, 9)
    lab.add("B", 2, 9)
    lab.step()
    lab.step()
    lab.add("C", 2, 9)
    lab.add("D", 3, 9)
    lab.step()
    assert lab.batches == ["A2 B2", "A1 B1", "A1 B1 C2 D3"]
    assert lab.executor.plans[-1].num_tokens == 7


def test_figure_8() -> None:
    """Three workers, max_bs 2: AB, CD, EF fill the pipeline, then A and B come again."""
    lab = Lab(max_bs=2, n_workers=3)
    for request_id in "ABCDEF":
        lab.add(request_id, 2, 3)
    lab.step()
    assert lab.batches == ["A2 B2", "C2 D2", "E2 F2"]
    assert lab.engine.stats.in_flight == 2, "line 10 waits for one of the three"
    lab.step()
    assert lab.batches[3:] == ["A1 B1"]
    lab.run()
    assert lab.batches[3:] == ["A1 B1", "C1 D1", "E1 F1"] * 2
    assert lab.returned == [""] * 6 + ["AB", "CD", "EF"]


def test_pipeline_takes_newcomers_where_others_left() -> None:
    lab = Lab(max_bs=1, n_workers=2)
    lab.add("A", 1, 3)
    lab.add("B", 1, 1)
    lab.add("C", 1, 1)
    lab.run()
    assert lab.batches == ["A1", "B1", "A1", "C1", "A1"]


def test_an_idle_pipeline_waits_for_what_is_in_flight() -> None:
    """Without a selection the step collects, instead of submitting an empty batch."""
    lab = Lab(max_bs=2, n_workers=3)
    lab.add("A", 2, 3)
    lab.run()
    assert lab.batches == ["A2", "A1", "A1"]
    assert [len(choices) for choices in lab.scheduler.seen] == [1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("n_workers", [1, 2])
def test_max_bs(n_workers: int) -> None:
    lab = Lab(max_bs=2, n_workers=n_workers)
    for request_id in "ABCDE":
        lab.add(request_id, 1, 2)
    lab.run()
    assert all(len(batch.split()) <= 2 for batch in lab.batches)
    assert lab.batches[:4] == (
        ["A1 B1", "A1 B1", "C1 D1", "C1 D1"] if n_workers == 1 else ["A1 B1", "C1 D1"] * 2
    )


def test_slots_hold_back_newcomers_in_order() -> None:
    """Line 25 is a break: C would fit beside A, and waits behind B all the same."""
    lab = Lab(max_bs=4, n_slots=10)
    lab.add("A", 2, 2)  # 4 slots
    lab.add("B", 6, 1)  # 7 slots, 11 with A
    lab.add("C", 1, 1)  # 2 slots
    lab.run()
    assert lab.batches == ["A2", "A1", "B6 C1"]


def test_slots_exactly_full() -> None:
    lab = Lab(max_bs=4, n_slots=10)
    lab.add("A", 2, 3)
    lab.add("B", 3, 2)  # 5 + 5 slots
    lab.step()
    assert lab.batches == ["A2 B3"]
    assert lab.kv.reserved_slots == 10
    lab.run()


def test_a_full_cache_never_holds_back_an_increment() -> None:
    lab = Lab(max_bs=3, n_slots=8)
    lab.add("A", 2, 2)
    lab.add("B", 2, 2)
    lab.add("C", 2, 2)
    lab.run()
    assert lab.batches == ["A2 B2", "A1 B1", "C2", "C1"]


def test_reservation_returns_with_the_last_token() -> None:
    lab = Lab(max_bs=2)
    lab.add("A", 2, 1)
    lab.add("B", 3, 5)
    lab.step()
    assert lab.kv.reserved_slots == 8
    assert lab.engine.stats.running == 1


def test_cohorts_of_a_pipeline_never_merge() -> None:
    """A property of Algorithm 1: A and C could share a batch, and do not."""
    lab = Lab(max_bs=2, n_workers=2)
    lab.add("A", 1, 4)
    lab.add("B", 1, 1)
    lab.add("C", 1, 4)
    lab.add("D", 1, 1)
    lab.run()
    assert lab.batches == ["A1 B1", "C1 D1"] + ["A1", "C1"] * 3


class CountingPool(RequestPool):
    """Counts the requests read by schedulers."""

    num_read = 0

    def __iter__(self) -> Iterator[Request]:
        for request in super().__iter__():
            self.num_read += 1
            yield request


def test_ten_thousand_waiting_requests_are_not_read() -> None:
    kv = KVManager(num_blocks=(100,), page_size=4, num_rows=2, n_slots=100)
    pool = CountingPool(kv, vocab_size=10, max_model_len=64)
    for number in range(10_000):
        pool.add_request(str(number), [1], SamplingParams(max_tokens=4), seed=0, arrival=0.0)
    engine = Engine(ToyExecutor(10, (100,), 4, 2), OrcaScheduler(max_bs=2), pool)
    for _ in range(9):
        engine.step()
    assert pool.num_read == 9 * 3, "two that run and the one that ends the search"
