"""Check-in intervals by hand: the repeated steps, the reported tokens, and the admitted requests."""

import pytest

from orca_jax.request import SamplingParams
from tests.sched.lab import Lab, Shape, run_lab
from tests.sched.test_properties import EOS

STEPPED = Shape(depth=1, reuses_prefixes=False, budget=8, intervals=(2, 4))  # from 8 and 16 tokens to go

TABLE = {
    "a long request is checked every 4 iterations, a medium one every 2, and at the end after each": (
        {"max_bs": 1, "shape": STEPPED},
        [("A", 3, 20)],
        ["A3", "4x A1", "2x A1", "2x A1", "2x A1", "2x A1", *["A1"] * 7],
    ),
    "a short request is reported after each, and a long one keeps its tokens until it is due": (
        {"max_bs": 2, "shape": STEPPED},
        [("A", 2, 17), ("B", 2, 4)],
        ["A2 B2", "1x A1~ B1", "1x A1~ B1", "1x A1~ B1", "A1", *["2x A1"] * 3, *["A1"] * 6],
    ),
    "a request waits for a row": (
        {"max_bs": 1, "shape": STEPPED},
        [("A", 2, 9), ("B", 2, 1)],
        ["A2", "2!x A1", *["A1"] * 6, "B2"],
    ),
    "a chunk of a prompt is not repeated, and every member is reported": (
        {"max_bs": 2, "shape": STEPPED},
        [("A", 2, 18), ("B", 9, 1)],
        ["A2 B6-", "A1 B3", "4x A1", *["2x A1"] * 3, *["A1"] * 6],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_by_hand(case: str) -> None:
    sizes, requests, iterations = TABLE[case]
    lab = run_lab(requests, **sizes)
    assert lab.batches == iterations


@pytest.mark.parametrize("waits", [False, True])
def test_the_first_end_admits_the_next_request(waits: bool) -> None:
    """If no request waits, the other members continue without the ended one; otherwise the device stops."""

    def ends_at_third(request_id: str, length: int, token: int) -> int:
        return EOS if (request_id, length) == ("B", 5) else 1

    lab = Lab(max_bs=2, shape=STEPPED, eos=[EOS], override=ends_at_third)
    lab.add("A", 2, 30)
    lab.add("B", 3, 30)
    if waits:
        lab.add("C", 2, 1)
    lab.step()
    lab.step()
    assert (lab.tokens["A"], lab.tokens["B"]) == ([1] * (3 if waits else 5), [1, 1, EOS])
    lab.step()
    assert ("C" in lab.tokens) is waits
    lab.run()
    assert lab.tokens["A"] == [1] * 30


def test_logits_that_are_not_finite_end_a_request_within_its_repetitions() -> None:
    lab = Lab(max_bs=1, shape=STEPPED, override=lambda _, length, token: None if length == 5 else 1)
    lab.add("A", 2, 30)
    lab.run()
    assert lab.tokens["A"] == [1] * 3
    assert lab.ends["A"].finish_reason == "error"
    assert lab.batches == ["A2", "4x A1"]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, logprobs=1),
        SamplingParams(max_tokens=20, allowed_token_ids=(1, 2)),
        SamplingParams(max_tokens=20, presence_penalty=1),
        SamplingParams(max_tokens=20, logit_bias={1: 1}),
        SamplingParams(max_tokens=20, stop_token_ids=tuple(range(20, 30))),
    ],
    ids=["logprobs", "constrained", "penalty", "bias", "many ends"],
)
def test_requests_that_need_the_host_are_not_repeated(params: SamplingParams) -> None:
    lab = Lab(max_bs=2, shape=STEPPED)
    lab.engine.add("A", [1, 2], params)
    lab.add("B", 2, 40)
    while "A" not in lab.ends:
        lab.step()
    assert not any(plan.multi_step is not None for plan in lab.executor.plans)
    lab.run()
    assert any(plan.multi_step is not None for plan in lab.executor.plans)


def test_unreported_tokens_are_drawn_again_after_a_preemption() -> None:
    lab = Lab(max_bs=2, shape=STEPPED)
    params = SamplingParams(max_tokens=20, temperature=1, seed=3)
    lab.engine.add("A", [1, 2, 3], params)
    lab.add("B", 3, 3)
    for _ in range(2):
        lab.step()
    (request,) = [request for request in lab.pool if request.request_id == "A"]
    assert request.num_pending == 1, "it keeps a token on the device"
    lab.pool.preempt(request)
    lab.run()
    assert lab.tokens["A"] == lab.expected([1, 2, 3], params)


def test_steps_end_when_pages_run_out() -> None:
    """Ten pages of two tokens. After 9 and 8 tokens, two more steps of both would take eleven pages."""
    lab = Lab(max_bs=2, page_size=2, max_model_len=20, shape=STEPPED._replace(num_pages=10))
    lab.add("A", 3, 17)
    lab.add("B", 2, 17)
    lab.run()
    assert lab.batches[:5] == ["A3 B2", "4x A1 B1", "2x A1 B1", "1x A1~ B1~", "A1"]
