"""Speculation on the toy model: the tokens of every request are those without it, and pages balance."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from orca_jax.sched.drafts.model import ModelProposer
from orca_jax.sched.drafts.proposer import Chance, Wish
from orca_jax.sched.drafts.scheduler import DraftLimits, SpeculativeScheduler
from orca_jax.sched.request import Request
from orca_jax.sim.toy import ToyExecutor
from orca_jax.values.request import SamplingParams
from tests.sched.lab import VOCAB, Lab, Shape
from tests.sim.oracle import toy_generate

LIMITS = DraftLimits(per_request=4, per_iteration=16, max_bs=8, with_extras=8, max_tokens=64)


class Oracle:
    """Proposes ids of which about two thirds are right, from the toy's own answer."""

    seconds = 0.0

    def __init__(self) -> None:
        self.random = random.Random(7)
        self.results: list[tuple[int, int]] = []

    def chance(self, request: Request) -> Chance:
        return Chance(1.0, 0.8)

    def ready(self, request: Request) -> int:
        return self.random.randint(0, 4)

    def propose(self, wishes: Sequence[Wish]) -> list[Sequence[int]]:
        return [self._of(*wish) for wish in wishes]

    def _of(self, request: Request, count: int) -> list[int]:
        answer = toy_generate(
            request.prompt_ids, request.params, vocab_size=VOCAB, seed=request.seed
        )
        ids = answer[len(request.generated_ids) :][:count]
        return [token if self.random.random() < 0.67 else (token + 1) % VOCAB for token in ids]

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.results.append((num_drafts, num_accepted))


def speculative_lab(
    name: str = "chunked", limits: DraftLimits = LIMITS, **sizes: Any
) -> tuple[Lab, Oracle]:
    lab = Lab(name, **sizes)
    oracle = Oracle()
    shape: Shape | None = sizes.get("shape")
    overlaps = shape is not None and shape.stages == 1 and shape.depth == 2
    scheduler = SpeculativeScheduler(lab.scheduler.inner, oracle, limits, {}, overlaps=overlaps)
    lab.scheduler.inner = scheduler
    scheduler.is_on = True
    return lab, oracle


SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("orca", {"max_bs": 4, "n_slots": 300}),
    ("orca", {"max_bs": 2, "n_workers": 2, "n_slots": 120}),
    ("request_level", {"max_bs": 4, "n_slots": 300}),
    ("chunked", {"max_bs": 4, "shape": Shape()}),
    ("chunked", {"max_bs": 4, "shape": Shape(depth=1, num_pages=18)}),
    ("chunked", {"max_bs": 4, "shape": Shape(num_pages=18, budget=6)}),
    ("chunked", {"max_bs": 2, "shape": Shape(depth=3, stages=2)}),
]


@pytest.mark.parametrize(("name", "sizes"), SHAPES)
def test_tokens_are_those_without_speculation(name: str, sizes: dict[str, Any]) -> None:
    """With ends by id inside of a proposal, sampled and greedy, preemption, aborts and requests with extras."""
    rng = random.Random(3)
    lab, oracle = speculative_lab(name, **sizes)
    jobs: dict[str, tuple[list[int], SamplingParams]] = {}
    for number in range(16):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        params = SamplingParams(
            max_tokens=rng.randint(1, 40),
            temperature=rng.choice((0, 1)),
            seed=number,
            stop_token_ids=rng.sample(range(VOCAB), 1),
            presence_penalty=1.0 if number % 5 == 4 else 0.0,
            min_tokens=1 if number % 7 == 6 else 0,
        )
        jobs[str(number)] = prompt, params
        lab.engine.add_request(str(number), prompt, params)
        if number % 3 == 0:
            lab.step()
    lab.engine.abort("11")
    lab.run()
    for request_id, (prompt, params) in jobs.items():
        if request_id != "11":
            assert lab.tokens[request_id] == lab.expected(prompt, params), request_id
    drafts = lab.pool.drafts
    assert drafts.num_drafts > 10
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    assert sum(drafts.accepted_per_pos) == drafts.num_accepted_tokens
    assert len(oracle.results) > 5
    assert all(0 <= accepted <= proposed for proposed, accepted in oracle.results)


def flat_lab(
    proposer: Oracle | ModelProposer, limits: DraftLimits = LIMITS, longest: float = 1.0
) -> tuple[Lab, SpeculativeScheduler]:
    """A lab whose iterations take equally long for up to 3 tokens, and `longest` times as long for up to 64."""
    lab = Lab(max_bs=4, shape=Shape(depth=1), max_model_len=400)
    clock = iter(range(10**6))
    launches = {1: 1.0, 3: 1.0, 64: longest}
    scheduler = SpeculativeScheduler(
        lab.scheduler.inner, proposer, limits, launches, clock=lambda: float(next(clock))
    )
    lab.scheduler.inner = scheduler
    return lab, scheduler


def test_wrong_proposals_stop_and_are_tried_again() -> None:
    """A draft model that is always wrong: fewer than one iteration in ten has its proposals in the end."""
    executor = ToyExecutor(
        VOCAB, (4 * 100,), 4, 4, override=lambda name, length, token: (token + 1) % VOCAB
    )
    lab, _ = flat_lab(ModelProposer(executor, 4, 100, 4))
    for name in "ABC":
        lab.add(name, 5, 390)
    lab.run()
    assert lab.pool.drafts.num_accepted_tokens == 0
    early, late = lab.executor.plans[:60], lab.executor.plans[-200:]
    proposing = [
        sum(any(member.num_drafts for member in plan.members) for plan in part)
        for part in (early, late)
    ]
    assert proposing[0] > 4
    assert proposing[1] <= 20


@pytest.mark.parametrize(
    ("longest", "first"),
    [
        (1.5, range(30)),  # three iterations of 1.5 cost 1.5 more: allowed at once
        (2.0, range(45, 80)),  # three more: one of them is a share of fifty iterations
        (9.0, range(0)),  # twenty-four more: not within these answers
    ],
)
def test_a_try_costs_little(longest: float, first: range) -> None:
    """The proposals of three requests need a larger launch, and nobody knows whether one is right."""
    oracle = Oracle()
    oracle.chance = lambda request: Chance(1.0, 0.35)  # type: ignore[method-assign]
    lab, _ = flat_lab(oracle, longest=longest)
    for name in "ABC":
        lab.add(name, 5, 390)
    lab.run()
    places = [
        place
        for place, plan in enumerate(lab.executor.plans)
        if any([member.num_drafts for member in plan.members])
    ]
    assert [place in first for place in places[:1]] == [True] * bool(first)


def test_iterations_beside_prompts_are_not_measured() -> None:
    """A device runs one iteration after another: the first increments wait for the prompts before them."""
    lab, scheduler = flat_lab(Oracle())
    for name in "ABC":
        lab.add(name, 5, 20)
    measured: list[int] = []

    def add_time(num_tokens: int, seconds: float, *, waits: bool) -> None:
        measured.append(len(lab.executor.plans))

    scheduler.times.add_time = add_time  # type: ignore[method-assign]
    lab.run()
    prompts = [
        place
        for place, plan in enumerate(lab.executor.plans)
        if any([len(member.ids) > 1 and not member.num_drafts for member in plan.members])
    ]
    assert prompts and min(measured) >= prompts[-1] + 3


def test_right_proposals_go_on() -> None:
    lab, scheduler = flat_lab(Oracle())
    lab.add("A", 5, 390)
    lab.run()
    assert scheduler.is_on
    assert len(lab.executor.plans) < 270


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"max_bs": 2}, 0),
        ({"per_iteration": 2}, 2),
        ({"max_tokens": 6}, 3),
        ({"per_request": 1}, 3),
    ],
)
def test_limits(changes: dict[str, int], most: int) -> None:
    lab, _ = flat_lab(Oracle(), dataclasses.replace(LIMITS, **changes))
    for number, name in enumerate("ABC"):  # equal prompts would start one after another
        lab.engine.add_request(
            name, [number, 2, 3, 4, 5], SamplingParams(max_tokens=60, temperature=0)
        )
    lab.run()
    assert (
        max(sum(member.num_drafts for member in plan.members) for plan in lab.executor.plans[:-1])
        <= most
    )
    assert (lab.pool.drafts.num_drafts > 0) == (most > 0)


def test_requests_for_the_full_sampler_leave_few_places() -> None:
    """One request has a penalty, and the full sampler has six places: for a row each, and for the rest in proposals."""
    lab, _ = flat_lab(Oracle(), dataclasses.replace(LIMITS, with_extras=6))
    lab.engine.add_request(
        "P", [1, 2], SamplingParams(max_tokens=80, temperature=0, presence_penalty=1.0)
    )
    for name in "AB":
        lab.add(name, 5, 60)
    lab.run()
    beside = [
        plan for plan in lab.executor.plans if "P" in {member.request_id for member in plan.members}
    ]
    assert max(sum(1 + member.num_drafts for member in plan.members) for plan in beside) == 6
    assert all(
        member.num_drafts == 0
        for plan in beside
        for member in plan.members
        if member.request_id == "P"
    )
