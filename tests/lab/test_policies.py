"""The schedulers for comparison: batches by hand, and every token under any arrivals and aborts."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.paper.places import Place, simulate
from lab.paper.runs import Lengths
from lab.paper.systems import parse_system
from lab.policies import POLICIES, Setting
from lab.policies.cells import CellScheduler
from lab.policies.padded import PaddedScheduler
from lab.policies.pools import PoolsScheduler
from lab.policies.prefill_first import MOST_TOKENS, PrefillFirstScheduler
from orca_jax.sched.scheduler import Scheduler
from tests.sched.lab import Lab, Shape
from tests.sched.test_properties import EOS, PLAIN_ARRIVALS, Arrival, serve

SLOTS = 120
RESERVING: dict[str, Callable[[int, int], Scheduler]] = {
    "cells": CellScheduler,
    "token_cells": lambda max_bs, n_workers: CellScheduler(max_bs, n_workers, by_token=True),
    "padded": PaddedScheduler,
    "pools": lambda max_bs, n_workers: PoolsScheduler(max_bs + 1, n_workers, bounds=(4,)),
}


def lab_of(scheduler: Scheduler, max_bs: int, page_size: int = 4, n_slots: int = SLOTS) -> Lab:
    """A lab with reservations."""
    lab = Lab(max_bs=max_bs, n_workers=scheduler.n_workers, n_slots=n_slots, page_size=page_size, eos=(EOS,))
    lab.scheduler.inner = scheduler
    return lab


def paged_lab(max_bs: int, n_workers: int, page_size: int, num_pages: int) -> Lab:
    """A lab of `prefill_first` with pages on demand."""
    shape = Shape(depth=n_workers, stages=n_workers, num_pages=num_pages, reuses_prefixes=False)
    lab = Lab(max_bs=max_bs, page_size=page_size, shape=shape, eos=(EOS,))
    lab.scheduler.inner = PrefillFirstScheduler(max_bs, n_workers)
    return lab


def run(lab: Lab, *requests: tuple[str, int, int]) -> list[str]:
    for request in requests:
        lab.add(*request)
    lab.run()
    return lab.batches


@pytest.mark.parametrize("name", RESERVING)
@settings(max_examples=40, deadline=None)
@given(arrivals=PLAIN_ARRIVALS, max_bs=st.integers(1, 4), n_workers=st.integers(1, 3), page_size=st.integers(1, 6))
def test_every_request_gets_its_tokens(
    name: str, arrivals: list[Arrival], max_bs: int, n_workers: int, page_size: int
) -> None:
    scheduler = RESERVING[name](max_bs, n_workers)
    lab = lab_of(scheduler, max_bs + (name == "pools"), page_size)
    serve(lab, arrivals)
    assert max(map(len, lab.scheduler.seen)) <= max_bs


@settings(max_examples=100, deadline=None)
@given(
    arrivals=PLAIN_ARRIVALS.map(lambda arrivals: [replace(each, step=each.step // 8) for each in arrivals]),
    max_bs=st.integers(1, 4),
    n_workers=st.integers(1, 3),
    sizes=st.sampled_from([(1, 26), (1, 40), (3, 9), (5, 8), (26, 1), (4, 60)]),  # 26 tokens: the longest request
)
def test_prefill_first_preempts_and_loses_no_token(
    arrivals: list[Arrival], max_bs: int, n_workers: int, sizes: tuple[int, int]
) -> None:
    lab = paged_lab(max_bs, n_workers, *sizes)
    serve(lab, arrivals)
    assert max(map(len, lab.scheduler.seen)) <= max_bs
    kinds = [{member.start == 0 for member in plan.members} for plan in lab.executor.plans]
    assert max(map(len, kinds), default=0) <= 1, "prompts come alone"


def test_prompts_come_first_and_alone() -> None:
    lab = paged_lab(3, 1, 4, 60)
    lab.add("A", 5, 4)
    lab.step()
    lab.step()
    assert run(lab, ("B", 3, 2), ("C", 2, 1)) == ["A5", "A1", "B3 C2", "A1 B1", "A1"]


def test_the_latest_request_loses_its_pages() -> None:
    """Six pages of four, two for each prompt. The ninth tokens of A and B take those of C, the 13th of A those of B."""
    lab = paged_lab(3, 1, 4, 6)
    batches = run(lab, ("A", 7, 8), ("B", 7, 8), ("C", 7, 4))
    assert batches == ["A7 B7 C7", "A1 B1 C1", *["A1 B1"] * 4, "A1", "A1", "B13", "B1", "C9", "C1"]
    assert lab.pool.num_preemptions == 2


def test_a_request_without_a_victim_loses_its_own_pages() -> None:
    """Three pages of four. A takes the page of C, and none is left for the fifth token of B."""
    lab = paged_lab(3, 1, 4, 3)
    assert run(lab, ("A", 4, 2), ("B", 4, 2), ("C", 3, 2)) == ["A4 B4 C3", "A1", "B5 C4"]


def test_new_requests_leave_a_page_free() -> None:
    """32 pages of one token: twelve are free beside the prompt of A, and one of them stays free."""
    lab = paged_lab(2, 1, 1, 32)
    lab.add("A", 20, 3)
    lab.step()
    lab.add("B", 12, 1)
    lab.run()
    assert lab.batches == ["A20", "A1", "A1", "B12"]


def test_an_iteration_has_a_bound_on_prompt_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.policies.prefill_first.MOST_TOKENS", 8)
    lab = paged_lab(4, 1, 4, 60)
    assert run(lab, ("A", 10, 1), ("B", 5, 1), ("C", 3, 1), ("D", 1, 1)) == ["A10", "B5 C3", "D1"]
    assert MOST_TOKENS >= 2048, "the longest request of the paper fits"


def test_running_requests_are_shared_among_the_stages() -> None:
    """Two iterations in flight and three requests: two and one, and not three and none."""
    lab = paged_lab(4, 2, 4, 60)
    batches = run(lab, ("A", 2, 3), ("B", 2, 3), ("C", 2, 3))
    assert batches[0] == "A2 B2 C2" and batches[1:3] == ["A1 B1", "C1"]


def test_pools_take_turns() -> None:
    """One place for outputs up to 2 and one for longer ones: B waits for A, and C does not."""
    lab = lab_of(PoolsScheduler(2, bounds=(2,)), 2)
    batches = run(lab, ("A", 3, 2), ("B", 2, 2), ("C", 4, 3))
    assert batches == ["A3", "C4", "A1", "C1", "B2", "C1", "B1"]


def test_a_pool_stays_within_the_slots() -> None:
    """20 slots: A reserves 8 of them; C of the other pool needs 14 and waits."""
    lab = lab_of(PoolsScheduler(2, bounds=(4,)), 2, n_slots=20)
    assert run(lab, ("A", 5, 3), ("C", 8, 6))[:4] == ["A5", "A1", "A1", "C8"]


def test_a_reservation_counts_once() -> None:
    """A cell of one token: after the first one A holds its row and its 8 slots of 9, and is no newcomer again."""
    lab = lab_of(CellScheduler(1, by_token=True), 1, n_slots=9)
    assert run(lab, ("A", 5, 3)) == ["A1-", "A1-", "A1-", "A1-", "A1", "A1", "A1"]


def test_places_are_shared_equally() -> None:
    assert PoolsScheduler(32)._sizes == [10, 11, 11] and sum(PoolsScheduler(96)._sizes) == 96


def test_three_pools_read_the_weights_three_times() -> None:
    """With all weights and nothing else in the cost, three requests of different pools take three times as long."""
    place, requests = Place("101B", n_workers=1), [Lengths(32, each, each) for each in (40, 80, 120)]
    one, three = (
        max(simulate(parse_system(name, POLICIES), place, requests, [0.0] * 3).ends) for name in ("orca(3)", "pools(3)")
    )
    assert three / one == pytest.approx((40 + 80 + 120) / 120, rel=0.02)


def test_a_padded_batch_runs_as_long_as_its_longest_members() -> None:
    """A prompt of 50 with one token, and one of 40 with four: as two of 50 with four, and B keeps its place."""
    place, system = Place("101B", n_workers=1), parse_system("padded(2)", POLICIES)
    padded = simulate(system, place, [Lengths(50, 1, 1), Lengths(40, 4, 4)], [0.0, 0.0]).ends
    full = simulate(system, place, [Lengths(50, 4, 4)] * 2, [0.0, 0.0]).ends
    assert padded == full and padded[0] == padded[1]
    cost = place.cost
    increments = sum([cost.weights + 2 * cost.increment + cost.context * 2 * (50 + t) for t in (1, 2, 3)])
    assert padded[0] == pytest.approx(cost.weights + cost.initiation * 100 + increments)


def test_microbatches_are_as_long_as_their_batch() -> None:
    place, system = Place("101B", n_workers=2), parse_system("padded(2)", POLICIES)
    padded = simulate(system, place, [Lengths(40, 4, 4), Lengths(50, 4, 4)], [0.0, 0.0]).ends
    assert padded == simulate(system, place, [Lengths(50, 4, 4)] * 2, [0.0, 0.0]).ends


def test_a_padded_batch_has_a_microbatch_for_each_iteration_in_flight() -> None:
    scheduler = POLICIES["padded"].make(Setting(4, 0, 2, 2, 512))
    lab = lab_of(scheduler, 4)
    batches = run(lab, ("A", 3, 2), ("B", 2, 1), ("C", 4, 1), ("D", 4, 2), ("E", 1, 1))
    assert batches == ["A3 B2", "C4 D4", "A1 B1-", "C1- D1", "A1- B1-", "E1"], "E waits for the whole batch"
