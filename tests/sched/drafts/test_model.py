"""Proposals of a draft model: the toy proposes for the toy."""

import random

import pytest

from orca_jax.sched.drafts.model import ModelProposer
from orca_jax.sched.drafts.proposer import Wish
from orca_jax.sched.drafts.scheduler import SpeculativeScheduler
from orca_jax.sched.request import Request
from orca_jax.sim.toy import Override, ToyExecutor
from orca_jax.values.request import SamplingParams
from tests.sched.drafts.test_scheduler import LIMITS
from tests.sched.lab import VOCAB, Lab, Shape

PAGES = 16  # of 4 tokens


def make_proposer(num_rows: int = 3, override: Override | None = None) -> ModelProposer:
    executor = ToyExecutor(VOCAB, (num_rows * PAGES,), 4, num_rows, override=override)
    return ModelProposer(executor, num_rows, PAGES, 4)


def request_of(name: str, num_prompt: int, temperature: float = 0.0) -> Request:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
    return Request(name, list(range(1, num_prompt + 1)), params, 0.0, 0, 5, frozenset())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_equal_model_is_always_right(temperature: float) -> None:
    """It has the same seeds, so also with a temperature; accepted ids are not computed again, wrong ones are."""
    request, lab = request_of("a", 5, temperature), Lab()
    answer = lab.expected(request.prompt_ids, request.params)
    proposer = make_proposer()
    tokens = proposer._executor.stats
    for number, accepted, computed in ((3, 3, 5 + 2), (4, 2, 2 + 3), (2, 0, 1 + 1), (1, 1, 1)):
        before = tokens.tokens
        [drafts] = proposer.propose([Wish(request, number)])
        assert list(drafts) == answer[len(request.generated_ids) :][:number]
        assert tokens.tokens - before == computed
        request.generated_ids += answer[len(request.generated_ids) :][: accepted + 1]


def test_rows_change_their_holders() -> None:
    """Four requests take turns on three rows; each proposal is that of a request alone."""
    requests = [request_of(name, size) for name, size in (("a", 3), ("b", 9), ("c", 5), ("d", 7))]
    answers = [Lab().expected(request.prompt_ids, request.params) for request in requests]
    proposer, rng = make_proposer(), random.Random(2)
    for _ in range(12):
        chosen = rng.sample(range(4), rng.randint(1, 3))
        wishes = [Wish(requests[index], rng.randint(1, 4)) for index in chosen]
        for index, wish, drafts in zip(chosen, wishes, proposer.propose(wishes), strict=True):
            done = len(requests[index].generated_ids)
            assert list(drafts) == answers[index][done : done + wish.number]
            requests[index].generated_ids += answers[index][
                done : done + rng.randint(1, wish.number + 1)
            ]


def test_logits_that_are_not_finite_end_a_proposal() -> None:
    proposer = make_proposer(override=lambda name, length, token: None if length == 7 else token)
    request = request_of("a", 5)
    [drafts] = proposer.propose([Wish(request, 4)])
    assert list(drafts) == Lab().expected(request.prompt_ids, request.params)[:2]


def test_acceptance_is_learnt_and_forgotten() -> None:
    proposer, request, other = make_proposer(), request_of("a", 5), request_of("b", 5)
    before = proposer.chance(request).each
    for _ in range(10):
        proposer.propose([Wish(request, 4)])
        proposer.verified(request, 4, 0)
    assert proposer.chance(request).each < 0.2 < before
    assert proposer.chance(other).each < 0.3, "new requests begin with the share of the others"
    for _ in range(200):
        proposer.chance(other)
    assert proposer.chance(other).each > 0.5


@pytest.mark.parametrize("name", ["chunked", "orca", "request_level"])
def test_tokens_are_those_without_speculation(name: str) -> None:
    """The draft model is wrong after every fifth token; most proposals of four ids are cut."""
    sizes = {"shape": Shape(num_pages=18)} if name == "chunked" else {"n_slots": 300}
    lab = Lab(name, max_bs=3, **sizes)
    proposer = make_proposer(
        override=lambda name, length, token: (token + (length % 5 == 0)) % VOCAB
    )
    scheduler = SpeculativeScheduler(
        lab.scheduler.inner, proposer, LIMITS, {}, overlaps=name == "chunked"
    )
    lab.scheduler.inner, scheduler.is_on = scheduler, True
    jobs = {}
    for number in range(8):
        prompt = [(7 * number + i) % VOCAB for i in range(1 + 3 * number)]
        params = SamplingParams(max_tokens=30, temperature=number % 2, seed=number)
        jobs[str(number)] = prompt, params
        lab.engine.add_request(str(number), prompt, params)
        lab.step()
    lab.run()
    assert all(lab.tokens[name] == lab.expected(*job) for name, job in jobs.items())
    drafts = lab.pool.drafts
    assert 0.3 < drafts.num_accepted_tokens / drafts.num_draft_tokens < 0.95
