"""Requests at the door, and their ends."""

import pytest

from orca_jax.errors import RequestError
from orca_jax.request import Request, SamplingParams, State
from orca_jax.sched.kv import KVManager
from orca_jax.sched.planner import make_plan
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.scheduler import Choice
from orca_jax.step import RowSampling, StepPlan, StepResult

EOS = 9


def pool_of(n_slots: int = 40) -> RequestPool:
    kv = KVManager(num_pages=20, page_size=4, num_rows=4, n_slots=n_slots)
    return RequestPool(kv, vocab_size=10, max_model_len=32, eos_token_ids=[EOS])


def add(pool: RequestPool, request_id: str = "a", prompt=(1, 2, 3), **params) -> Request:
    return pool.add(request_id, prompt, SamplingParams(**params), seed=5, arrival=1.0)


def run_once(pool: RequestPool, request: Request, token: int, finite: bool = True) -> StepPlan:
    plan = make_plan(0, [Choice(request, request.num_tokens - request.num_computed)], pool, now=2.0)
    pool.record(plan, StepResult(0, [token], [finite]))
    return plan


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "param", "message"),
    [
        ([], 4, "prompt", "empty"),
        ([1, 10], 4, "prompt", "id 10 is outside the model's vocabulary of 10"),
        ([1, -1], 4, "prompt", "id -1 is outside"),
        ([1, 2.0], 4, "prompt", "integers, got 2.0"),
        ([1, True], 4, "prompt", "integers, got True"),
        ([1, "2"], 4, "prompt", "integers, got '2'"),
        ([1] * 32, 1, "prompt", "at most 31 tokens"),
        ([1] * 99, 1, "prompt", "at most 31 tokens"),
        ([1] * 30, 3, "max_tokens", "make 33.*lower max_tokens to at most 2"),
        ([1] * 10, 11, "max_tokens", "n_slots=20"),
        ([1] * 21, 1, "prompt", "n_slots=20"),
    ],
)
def test_what_can_never_run_is_rejected(prompt, max_tokens: int, param: str, message: str) -> None:
    pool = pool_of(n_slots=20)
    with pytest.raises(RequestError, match=message) as caught:
        add(pool, prompt=prompt, max_tokens=max_tokens)
    assert caught.value.param == param
    assert len(pool) == 0
    assert not pool.has_work


def test_what_just_fits_is_taken() -> None:
    add(pool_of(n_slots=40), prompt=[0] * 31, max_tokens=1)
    add(pool_of(n_slots=20), prompt=[9] * 10, max_tokens=10)


def test_ids_are_unique_among_the_living() -> None:
    pool = pool_of()
    request = add(pool, max_tokens=1)
    with pytest.raises(RequestError, match="already") as caught:
        add(pool)
    assert caught.value.param == "request_id"
    run_once(pool, request, 4)
    with pytest.raises(RequestError, match="already"):
        add(pool)
    pool.deliver(lambda _: True, 3.0)
    add(pool)


def test_an_aborted_id_is_taken_until_its_end_was_handed_out() -> None:
    pool = pool_of()
    add(pool)
    pool.abort("a")
    with pytest.raises(RequestError, match="already"):
        add(pool)
    pool.deliver(lambda _: True, 3.0)
    add(pool)


def test_order_of_arrival() -> None:
    pool = pool_of()
    for request_id in "cab":
        add(pool, request_id)
    pool.abort("a")
    add(pool, "d")
    assert [request.request_id for request in pool] == ["c", "b", "d"]
    assert [request.arrival_index for request in pool] == [0, 2, 3]


def test_the_callers_prompt_is_copied() -> None:
    pool, prompt = pool_of(), [1, 2]
    request = add(pool, prompt=prompt)
    prompt.append(3)
    assert request.prompt_ids == [1, 2]


@pytest.mark.parametrize(("asked", "seed"), [(None, 5), (0, 0), (-3, -3)])
def test_seed(asked: int | None, seed: int) -> None:
    assert add(pool_of(), seed=asked).seed == seed


@pytest.mark.parametrize(
    ("params", "token", "reason"),
    [
        ({"max_tokens": 5}, 4, None),
        ({"max_tokens": 5}, EOS, "stop"),
        ({"max_tokens": 5, "ignore_eos": True}, EOS, None),
        ({"max_tokens": 5, "stop_token_ids": [4]}, 4, "stop"),
        ({"max_tokens": 5, "stop_token_ids": [4], "ignore_eos": True}, 4, "stop"),
        ({"max_tokens": 5, "stop_token_ids": [4]}, EOS, "stop"),
        ({"max_tokens": 1}, 4, "length"),
        ({"max_tokens": 1}, EOS, "stop"),
    ],
)
def test_ends(params: dict, token: int, reason: str | None) -> None:
    pool = pool_of()
    request = add(pool, **params)
    run_once(pool, request, token)
    [update] = pool.deliver(lambda _: True, 3.0)
    assert update.new_ids == (token,), "a stop token stays among the ids"
    assert update.finish_reason == reason
    assert (update.metrics is None) == (reason is None)
    assert len(pool) == (reason is None)
    pool.check_integrity()


def test_logits_that_are_not_finite_end_one_request() -> None:
    pool = pool_of()
    request = add(pool, max_tokens=5)
    run_once(pool, request, 4)
    run_once(pool, request, 0, finite=False)
    [update] = pool.deliver(lambda _: True, 3.0)
    assert update.new_ids == (4,), "the meaningless token is dropped"
    assert update.finish_reason == "error"
    assert update.error is not None and "not finite" in update.error
    assert pool.kv.num_held_rows == 0


def test_updates_wait_until_they_may_go() -> None:
    pool = pool_of()
    request = add(pool, max_tokens=2)
    run_once(pool, request, 4)
    assert pool.deliver(lambda _: False, 3.0) == []
    run_once(pool, request, 5)
    assert pool.deliver(lambda _: False, 4.0) == []
    assert pool.kv.num_held_rows == 1, "it keeps its place"
    assert pool.has_work
    [update] = pool.deliver(lambda _: True, 5.0)
    assert update.new_ids == (4, 5)
    assert update.metrics is not None and update.metrics.first_token == 5.0, "when it was handed out"
    assert not pool.has_work


def test_abort_of_a_waiting_request() -> None:
    pool = pool_of()
    add(pool)
    assert pool.abort("a")
    assert len(pool) == 0 and pool.has_work
    assert not pool.abort("a"), "once"
    assert not pool.abort("nobody")
    [update] = pool.deliver(lambda _: True, 3.0)
    assert (update.request_id, update.new_ids, update.finish_reason, update.metrics) == ("a", (), "abort", None)
    assert not pool.has_work


def test_abort_in_flight_waits_for_the_iteration() -> None:
    pool = pool_of()
    request = add(pool)
    plan = make_plan(0, [Choice(request, 3)], pool, now=2.0)
    assert pool.abort("a")
    assert not pool.abort("a"), "once"
    assert pool.kv.num_held_rows == 1, "the iteration still writes there"
    assert pool.deliver(lambda _: True, 3.0) == []
    pool.record(plan, StepResult(0, [4], [True]))
    assert pool.kv.num_held_rows == 0
    [update] = pool.deliver(lambda _: True, 3.0)
    assert (update.new_ids, update.finish_reason) == ((), "abort")
    pool.check_integrity()


def test_results_must_fit_the_plan() -> None:
    pool = pool_of()
    plan = make_plan(0, [Choice(add(pool), 3)], pool, now=2.0)
    with pytest.raises(AssertionError, match="samples 1 tokens, the result has 2"):
        pool.record(plan, StepResult(0, [4, 4], [True, True]))


def test_plan_of_a_chunked_prompt() -> None:
    """No scheduler here cuts prompts freely yet, but plans can say it."""
    pool = pool_of()
    request = add(pool, prompt=[1, 2, 3, 4, 5], max_tokens=3, temperature=0.5, top_k=-1, top_p=0.9)
    plans, tokens = [], []
    for iteration, count in enumerate([2, 3, 1]):
        plan = make_plan(iteration, [Choice(request, count)], pool, now=2.0)
        assert request.state is State.RUNNING
        plans.append(plan.members[0])
        sampled = [6 + iteration] if plan.members[0].samples else []
        pool.record(plan, StepResult(iteration, sampled, [True] * len(sampled)))
        tokens.append((request.state, list(request.generated_ids)))
    assert tokens == [(State.INITIATION, []), (State.INCREMENT, [7]), (State.INCREMENT, [7, 8])]
    assert [(m.start, list(m.ids), m.samples) for m in plans] == [
        (0, [1, 2], False),
        (2, [3, 4, 5], True),
        (5, [7], True),
    ]
    assert [(m.num_old_pages, len(m.new_pages)) for m in plans] == [(0, 1), (1, 1), (2, 0)]
    assert [m.sampling for m in plans] == [RowSampling(0.5, 0, 0.9, 5, num_prompt=5), None, None], "told once, -1 as 0"


def test_check_integrity_sees_a_lost_row() -> None:
    pool = pool_of()
    request = add(pool)
    run_once(pool, request, 4)
    pool.check_integrity()
    request.row = None
    with pytest.raises(AssertionError, match="held by no live request"):
        pool.check_integrity()
