"""Systems that are not on the protocol of policies: batches by hand, and every token under any arrivals and aborts."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.baselines import POLICIES, Setting
from lab.baselines.cells import CellScheduler
from lab.baselines.padded import PaddedScheduler
from lab.paper.places import Place, serve_system
from lab.paper.runs import Lengths
from lab.paper.systems import parse_system
from orca_jax.sched.scheduler import Scheduler
from tests.sched.lab import Lab
from tests.sched.test_properties import EOS, PLAIN_ARRIVALS, Arrival, serve

SLOTS = 120
RESERVING: dict[str, Callable[[int, int], Scheduler]] = {
    "cells": CellScheduler,
    "token_cells": lambda max_bs, n_workers: CellScheduler(max_bs, n_workers, by_token=True),
    "padded": PaddedScheduler,
}


def lab_of(scheduler: Scheduler, max_bs: int, page_size: int = 4, n_slots: int = SLOTS) -> Lab:
    """A lab with reservations."""
    lab = Lab(
        max_bs=max_bs,
        n_workers=scheduler.n_workers,
        n_slots=n_slots,
        page_size=page_size,
        eos=(EOS,),
    )
    lab.scheduler.inner = scheduler
    return lab


def run(lab: Lab, *requests: tuple[str, int, int]) -> list[str]:
    for request in requests:
        lab.add(*request)
    lab.run()
    return lab.batches


@pytest.mark.parametrize("name", RESERVING)
@settings(max_examples=40, deadline=None)
@given(
    arrivals=PLAIN_ARRIVALS,
    max_bs=st.integers(1, 4),
    n_workers=st.integers(1, 3),
    page_size=st.integers(1, 6),
)
def test_every_request_gets_its_tokens(
    name: str, arrivals: list[Arrival], max_bs: int, n_workers: int, page_size: int
) -> None:
    scheduler = RESERVING[name](max_bs, n_workers)
    lab = lab_of(scheduler, max_bs, page_size)
    serve(lab, arrivals)
    assert max(map(len, lab.scheduler.seen)) <= max_bs


def test_a_reservation_counts_once() -> None:
    """A cell of one token: after the first one A holds its row and its 8 slots of 9, and is no newcomer again."""
    lab = lab_of(CellScheduler(1, by_token=True), 1, n_slots=9)
    assert run(lab, ("A", 5, 3)) == ["A1-", "A1-", "A1-", "A1-", "A1", "A1", "A1"]


def test_three_pools_read_the_weights_three_times() -> None:
    """With all weights and nothing else in the cost, three requests of different pools take three times as long."""
    place, requests = (
        Place("101B", n_workers=1),
        [Lengths(32, each, each) for each in (40, 80, 120)],
    )
    one, three = (
        max(serve_system(parse_system(name, POLICIES), place, requests, [0.0] * 3).ends)
        for name in ("orca(3)", "pools(3)")
    )
    assert three / one == pytest.approx((40 + 80 + 120) / 120, rel=0.02)


def test_a_padded_batch_runs_as_long_as_its_longest_members() -> None:
    """A prompt of 50 with one token, and one of 40 with four: as two of 50 with four, and B keeps its place."""
    place, system = Place("101B", n_workers=1), parse_system("padded(2)", POLICIES)
    padded = serve_system(system, place, [Lengths(50, 1, 1), Lengths(40, 4, 4)], [0.0, 0.0]).ends
    full = serve_system(system, place, [Lengths(50, 4, 4)] * 2, [0.0, 0.0]).ends
    assert padded == full and padded[0] == padded[1]
    cost = place.cost
    increments = sum(
        [cost.weights + 2 * cost.increment + cost.context * 2 * (50 + t) for t in (1, 2, 3)]
    )
    assert padded[0] == pytest.approx(cost.weights + cost.initiation * 100 + increments)


def test_microbatches_are_as_long_as_their_batch() -> None:
    place, system = Place("101B", n_workers=2), parse_system("padded(2)", POLICIES)
    padded = serve_system(system, place, [Lengths(40, 4, 4), Lengths(50, 4, 4)], [0.0, 0.0]).ends
    assert padded == serve_system(system, place, [Lengths(50, 4, 4)] * 2, [0.0, 0.0]).ends


def test_a_padded_batch_has_a_microbatch_for_each_iteration_in_flight() -> None:
    scheduler = POLICIES["padded"].make(Setting(4, 0, 2, 2, 512))
    lab = lab_of(scheduler, 4)
    batches = run(lab, ("A", 3, 2), ("B", 2, 1), ("C", 4, 1), ("D", 4, 2), ("E", 1, 1))
    assert batches == ["A3 B2", "C4 D4", "A1 B1-", "C1- D1", "A1- B1-", "E1"], (
        "E waits for the whole batch"
    )
