"""A check-in interval by hand: iterations submitted ahead, results read together, and allowed ids."""

import pytest

from orca_jax.values.request import SamplingParams
from tests.sched.lab import Lab, Shape
from tests.sched.test_properties import EOS

EVERY_THREE = Shape(depth=4, reuses_prefixes=False, budget=8, check_in_interval=3)


def turns(lab: Lab) -> list[tuple[int, int]]:
    """For each step: plans submitted in it, and iterations in flight after it."""
    found = []
    while lab.engine.has_work:
        before = len(lab.batches)
        lab.step()
        found.append((len(lab.batches) - before, lab.engine.stats.in_flight))
    return found


def test_three_results_are_read_together() -> None:
    """Four plans fill the place; three are read at a time, so one always runs."""
    lab = Lab(max_bs=1, shape=EVERY_THREE)
    lab.add("A", 2, 9)
    assert turns(lab) == [(4, 1), (3, 1), (2, 1), (0, 0)]
    assert lab.tokens["A"] == lab.expected([1, 2], SamplingParams(max_tokens=9, temperature=0))


def test_tokens_of_an_ended_request_are_dropped() -> None:
    """The end at the second token is read with two more, which were computed in vain."""
    lab = Lab(
        max_bs=1,
        shape=EVERY_THREE,
        eos=[EOS],
        override=lambda _, length, token: EOS if length == 3 else 1,
    )
    lab.add("A", 2, 9)
    assert turns(lab) == [(4, 1), (0, 0)]
    assert lab.tokens["A"] == [1, EOS]
    assert lab.batches == ["A2", "A1", "A1", "A1"]


def test_a_request_that_arrives_waits_for_three_results() -> None:
    lab = Lab(max_bs=2, shape=EVERY_THREE)
    lab.add("A", 2, 12)
    lab.step()
    lab.add("B", 2, 1)
    lab.run()
    assert lab.batches[:6] == ["A2", "A1", "A1", "A1", "A1 B2", "A1"]


def test_allowed_ids_wait_for_the_tokens_before() -> None:
    """The end is the likeliest token, and forbidden at first: each set follows from all tokens before it."""
    lab = Lab(
        max_bs=2,
        shape=EVERY_THREE,
        eos=[EOS],
        override=lambda name, _, token: EOS if name == "A" else token,
    )
    lab.add("B", 2, 20)
    lab.step()
    lab.engine.add_request("A", [1, 2], SamplingParams(max_tokens=9, temperature=0, min_tokens=1))
    lab.run()
    assert lab.batches[4:6] == ["B1 A2", "B1 A1"], (
        "the second waits for the first, and for one before it"
    )
    assert len(lab.tokens["A"]) == 2 and lab.tokens["A"].index(EOS) == 1


@pytest.mark.parametrize("at", [2, 4])
def test_logits_that_are_not_finite_end_a_request(at: int) -> None:
    lab = Lab(
        max_bs=1,
        shape=EVERY_THREE,
        override=lambda _, length, token: None if length == at + 1 else 1,
    )
    lab.add("A", 2, 30)
    lab.run()
    assert lab.tokens["A"] == [1] * (at - 1)
    assert lab.ends["A"].finish_reason == "error"


def test_tokens_are_drawn_again_after_a_preemption() -> None:
    lab = Lab(max_bs=2, shape=EVERY_THREE)
    params = SamplingParams(max_tokens=20, temperature=1, seed=3)
    lab.engine.add_request("A", [1, 2, 3], params)
    lab.add("B", 3, 3)
    lab.step()
    (request,) = [request for request in lab.pool if request.request_id == "A"]
    assert request.num_pending == 1, "it has a token on the device"
    lab.pool.preempt(request)
    lab.run()
    assert lab.tokens["A"] == lab.expected([1, 2, 3], params)
