"""The results of the shelf's papers, in short forms."""

import itertools
from collections.abc import Sequence

import pytest

from lab.shelf import fairness, optimum, prefixes, ratios, sorted_f, stability
from lab.shelf.hindsight import best_found, by_policy
from lab.shelf.hindsight import optimum as least
from lab.shelf.virtual import Call


def test_the_load_that_grows() -> None:
    assert (
        stability.growth("chunked", 1.4, 1200, 0) > 0.1 > stability.growth("chunked", 0.6, 1200, 0)
    )
    assert stability.growth("prefill_first", 0.9, 800, 0) > 0.5, (
        "others than work-conserving ones grow before"
    )


def by_hand(memory: int, calls: Sequence[Call]) -> float:
    """The least sum of latencies, of all first iterations."""
    most, best = sum([call.num_generated for call in calls]), float("inf")
    for waits in itertools.product(range(most + 1), repeat=len(calls)):
        starts = [int(call.arrival) + wait for call, wait in zip(calls, waits, strict=True)]
        held = [0] * (max(starts) + most + 1)
        for start, call in zip(starts, calls, strict=True):
            for j in range(call.num_generated):
                held[start + j] += call.num_prompt + j
        if max(held) <= memory:
            best = min(best, sum(waits) + sum([call.num_generated for call in calls]))
    return best


def test_the_optimum_is_that_of_all_schedules() -> None:
    calls = [Call(0.0, 2, 3), Call(0.0, 3, 2), Call(1.0, 1, 4)]
    for memory in (5, 6, 9):
        found = by_policy(memory, calls)
        assert least(memory, calls, found) == by_hand(memory, calls) <= found


@pytest.mark.parametrize("number", range(2))
def test_no_schedule_beats_the_optimum(number: int) -> None:
    assert 1 <= optimum.ratio(number, is_online=True) < 1.3


def test_a_search_finds_no_better_schedule_than_the_best() -> None:
    calls = [Call(0.0, 2, 3), Call(0.0, 3, 2), Call(0.0, 1, 4)]
    for memory in (5, 6, 9):
        assert by_hand(memory, calls) <= best_found(memory, calls) <= by_policy(memory, calls)


def test_the_bound_of_two_clients() -> None:
    assert fairness.measure("vtc", 200, 0) <= fairness.BOUND < fairness.measure("fcfs", 200, 0)


def test_reuse_shortens_the_tail() -> None:
    assert prefixes.p99("fcfs", 23.0, 150, 0) > 1.5 * prefixes.p99("k_lpm", 23.0, 150, 0)


def test_every_ratio_names_its_paper() -> None:
    assert ratios.ratio("fastserve", 60, 0) > 0 and len(ratios.PAPERS) == 6


@pytest.mark.parametrize("name", ratios.CLAIMS)
def test_every_claim_is_measured(name: str) -> None:
    assert ratios.claim(name, 40, 0) > 0


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    assert ratios.claim("ewsjf.ttft", 120, 0) > 1.5


@pytest.mark.parametrize("number", range(2))
def test_no_schedule_beats_the_optimum_of_long_prompts(number: int) -> None:
    to_least, _ = sorted_f.ratios(number)
    assert 1 <= to_least < 1.3


def test_shortest_first_loses_on_a_backlog_and_more_with_more_memory() -> None:
    """Eight tokens: two requests of 7 + 1 and eight of 1 + 2. The first small one comes beside the second large one."""
    assert by_policy(8, sorted_f.backlog(8)) == 1 + 2 + 3 + 4 * 4 + 3 * 6
    assert sorted_f.lower_bound(8) == 1 + 2 + 5 * 2 + 18 / 8 + 21 / 8 + 3
    small = sorted_f.on_backlog(16)
    large = sorted_f.on_backlog(256)
    assert large[1] > small[1] > 1
    assert large[0] < 1.6
