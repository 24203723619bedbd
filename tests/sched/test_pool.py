"""Admission of requests, their results, and their ends."""

import pytest

from orca_jax.sched.kv import KVManager
from orca_jax.sched.plan import make_plan
from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request, State
from orca_jax.sched.scheduler import Choice, Selection
from orca_jax.values.errors import RequestError
from orca_jax.values.request import SamplingParams, StructuredOutput, TokenLogprobs
from orca_jax.values.step import MemberResult, RowSampling, StepPlan, StepResult

EOS = 9


def pool_of(n_slots: int = 40) -> RequestPool:
    kv = KVManager(num_blocks=(20,), page_size=4, num_rows=4, n_slots=n_slots)
    return RequestPool(kv, vocab_size=10, max_model_len=32, eos_token_ids=[EOS])


def add(pool: RequestPool, request_id: str = "a", prompt=(1, 2, 3), **params) -> Request:
    return pool.add_request(request_id, prompt, SamplingParams(**params), seed=5, arrival=1.0)


def run_once(pool: RequestPool, request: Request, token: int, finite: bool = True) -> StepPlan:
    plan = make_plan(
        0, Selection([Choice(request, request.num_tokens - request.num_computed)]), pool, now=2.0
    )
    pool.record(plan, StepResult(0, [MemberResult((token,), finite)]))
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
def test_requests_that_can_never_run_are_rejected(
    prompt, max_tokens: int, param: str, message: str
) -> None:
    pool = pool_of(n_slots=20)
    with pytest.raises(RequestError, match=message) as caught:
        add(pool, prompt=prompt, max_tokens=max_tokens)
    assert caught.value.param == param
    assert len(pool) == 0
    assert not pool.has_work


def test_a_request_that_just_fits_is_accepted() -> None:
    add(pool_of(n_slots=40), prompt=[0] * 31, max_tokens=1)
    add(pool_of(n_slots=20), prompt=[9] * 10, max_tokens=10)


def check_id_is_free_after_delivery(pool: RequestPool) -> None:
    with pytest.raises(RequestError, match="already"):
        add(pool)
    pool.deliver(lambda _: True, 3.0)
    add(pool)


def test_ids_are_unique_among_live_requests() -> None:
    pool = pool_of()
    request = add(pool, max_tokens=1)
    with pytest.raises(RequestError, match="already") as caught:
        add(pool)
    assert caught.value.param == "request_id"
    run_once(pool, request, 4)
    check_id_is_free_after_delivery(pool)


def test_an_aborted_id_is_in_use_until_its_end_is_delivered() -> None:
    pool = pool_of()
    add(pool)
    pool.abort("a")
    check_id_is_free_after_delivery(pool)


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
    assert update.metrics is not None, "with the first ids, and with the last"
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


def test_updates_wait_until_they_may_return() -> None:
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
    assert update.metrics is not None and update.metrics.first_token == 5.0, (
        "the time of its delivery"
    )
    assert not pool.has_work


def test_abort_of_a_waiting_request() -> None:
    pool = pool_of()
    add(pool)
    assert pool.abort("a")
    assert len(pool) == 0 and pool.has_work
    assert not pool.abort("a"), "once"
    assert not pool.abort("unknown")
    [update] = pool.deliver(lambda _: True, 3.0)
    assert (update.request_id, update.new_ids, update.finish_reason, update.metrics) == (
        "a",
        (),
        "abort",
        None,
    )
    assert not pool.has_work


def test_abort_in_flight_waits_for_the_iteration() -> None:
    pool = pool_of()
    request = add(pool)
    plan = make_plan(0, Selection([Choice(request, 3)]), pool, now=2.0)
    assert pool.abort("a")
    assert not pool.abort("a"), "once"
    assert pool.kv.num_held_rows == 1, "the iteration still writes there"
    assert pool.deliver(lambda _: True, 3.0) == []
    pool.record(plan, StepResult(0, [MemberResult((4,))]))
    assert pool.kv.num_held_rows == 0
    [update] = pool.deliver(lambda _: True, 3.0)
    assert (update.new_ids, update.finish_reason) == ((), "abort")
    pool.check_integrity()


def test_results_must_fit_the_plan() -> None:
    pool = pool_of()
    plan = make_plan(0, Selection([Choice(add(pool), 3)]), pool, now=2.0)
    with pytest.raises(AssertionError, match="has 1 members, the result has 2"):
        pool.record(plan, StepResult(0, [MemberResult((4,)), MemberResult((4,))]))


def test_plan_of_a_chunked_prompt() -> None:
    """A plan may cut a prompt anywhere, also if no scheduler does so."""
    pool = pool_of()
    request = add(pool, prompt=[1, 2, 3, 4, 5], max_tokens=3, temperature=0.5, top_k=-1, top_p=0.9)
    plans, tokens = [], []
    for iteration, count in enumerate([2, 3, 1]):
        plan = make_plan(iteration, Selection([Choice(request, count)]), pool, now=2.0)
        assert request.state is State.RUNNING
        plans.append(plan.members[0])
        run = (6 + iteration,) if plan.members[0].is_sampling else ()
        pool.record(plan, StepResult(iteration, [MemberResult(run)]))
        tokens.append((request.state, list(request.generated_ids)))
    assert tokens == [(State.INITIATION, []), (State.INCREMENT, [7]), (State.INCREMENT, [7, 8])]
    assert [(m.start, list(m.ids), m.is_sampling) for m in plans] == [
        (0, [1, 2], False),
        (2, [3, 4, 5], True),
        (5, [7], True),
    ]
    assert [(m.num_old_blocks, [len(each) for each in m.new_blocks]) for m in plans] == [
        (0, [1]),
        (1, [1]),
        (2, []),
    ]
    sampling = RowSampling(request.params, 5, num_prompt=5)
    assert [m.sampling for m in plans] == [sampling, None, None], "sent once"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"stop_token_ids": (9, 10)},
            "stop_token_ids",
            "id 10 is outside the model's vocabulary of 10",
        ),
        ({"logit_bias": {3: 1.0, 12: 1.0}}, "logit_bias", "id 12 is outside"),
        ({"allowed_token_ids": (1, 2**30)}, "allowed_token_ids", "id 1073741824 is outside"),
        ({"bad_token_ids": ((1,), (2, 10))}, "bad_token_ids", "id 10 is outside"),
        ({"stop": ("x",)}, "stop", "use stop_token_ids"),
        ({"bad_words": ("x",)}, "bad_words", "use bad_token_ids"),
        ({"structured": StructuredOutput("json_object")}, "structured", "give its constraint"),
    ],
)
def test_parameters_that_cannot_be_honoured_are_rejected(
    fields: dict, param: str, message: str
) -> None:
    pool = pool_of()
    with pytest.raises(RequestError, match=message) as caught:
        add(pool, **fields)
    assert caught.value.param == param
    assert not pool.has_work


def test_the_engine_ignores_how_text_is_shown() -> None:
    add(pool_of(), include_stop_str_in_output=True, skip_special_tokens=False)


def test_two_iterations_of_one_request_in_flight() -> None:
    """A prompt in two chunks: the first one's return leaves the request running, and an abort waits for the second."""
    pool = pool_of()
    request = add(pool, prompt=[1, 2, 3, 4, 5])
    first = make_plan(0, Selection([Choice(request, 2)]), pool, now=2.0)
    second = make_plan(1, Selection([Choice(request, 3)]), pool, now=2.0)
    assert [plan.members[0].start for plan in (first, second)] == [0, 2]
    pool.record(first, StepResult(0, [MemberResult()]))
    assert (request.state, request.in_flight) == (State.RUNNING, 1)
    pool.check_integrity()
    pool.abort("a")
    assert pool.kv.num_held_rows == 1, "the second chunk still writes there"
    pool.record(second, StepResult(1, [MemberResult((4,))]))
    assert pool.kv.num_held_rows == 0
    assert [update.finish_reason for update in pool.deliver(lambda _: True, 3.0)] == ["abort"]


def test_plan_of_a_request_with_everything() -> None:
    pool = pool_of()
    fields = {
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {3: 2.0},
        "logprobs": 2,
    }
    request = add(pool, temperature=0.5, **fields)
    sampling = make_plan(0, Selection([Choice(request, 3)]), pool, now=2.0).members[0].sampling
    assert sampling == RowSampling(request.params, 5, num_prompt=3)
    assert {name: getattr(request.params, name) for name in fields} == fields
    assert sampling is not None and sampling.params.has_extras


def score_of(number: int) -> TokenLogprobs:
    return TokenLogprobs(-float(number), number)


def test_log_probabilities_are_delivered_with_their_ids() -> None:
    pool = pool_of()
    request = add(pool, max_tokens=3, logprobs=0)
    delivered = []
    for iteration, held in enumerate([False, True, False]):
        plan = make_plan(
            iteration,
            Selection([Choice(request, request.num_tokens - request.num_computed)]),
            pool,
            now=2.0,
        )
        pool.record(
            plan,
            StepResult(iteration, [MemberResult((4 + iteration,), logprobs=score_of(iteration))]),
        )
        delivered += [
            (u.new_ids, u.logprobs, u.prompt_logprobs)
            for u in pool.deliver(lambda _, held=held: not held, 3.0)
        ]
    assert delivered == [((4,), (score_of(0),), None), ((5, 6), (score_of(1), score_of(2)), None)]


def test_log_probabilities_are_delivered_only_on_request() -> None:
    pool = pool_of()
    requests = [add(pool, "a", max_tokens=1), add(pool, "b", max_tokens=1, logprobs=1)]
    plan = make_plan(0, Selection([Choice(request, 3) for request in requests]), pool, now=2.0)
    pool.record(plan, StepResult(0, [MemberResult((4,)), MemberResult((5,), logprobs=score_of(7))]))
    updates = pool.deliver(lambda _: True, 3.0)
    assert [update.logprobs for update in updates] == [(), (score_of(7),)]


def score(pool: RequestPool, request: Request, iteration: int, count: int) -> list[int]:
    """Run one chunk, with a score of n for the n-th id of the prompt; returns its targets."""
    plan = make_plan(iteration, Selection([Choice(request, count)]), pool, now=2.0)
    [member] = plan.members
    scores = [score_of(member.start + 1 + n) for n in range(len(member.targets))]
    run = (4,) if member.is_sampling else ()
    pool.record(plan, StepResult(iteration, [MemberResult(run, scores=scores)]))
    return list(member.targets)


@pytest.mark.parametrize("chunks", [[5], [1, 4], [4, 1], [2, 2, 1], [1, 1, 1, 1, 1]])
def test_a_prompt_is_scored_once_in_any_chunks(chunks: list[int]) -> None:
    pool = pool_of()
    request = add(pool, prompt=[5, 6, 7, 8, 9], prompt_logprobs=0, max_tokens=2)
    targets = [
        target for n, count in enumerate(chunks) for target in score(pool, request, n, count)
    ]
    assert targets == [6, 7, 8, 9]
    [update] = pool.deliver(lambda _: True, 3.0)
    assert update.prompt_logprobs == tuple(score_of(n) for n in (1, 2, 3, 4))
    assert score(pool, request, 9, 1) == []
    [update] = pool.deliver(lambda _: True, 3.0)
    assert update.prompt_logprobs is None, "they came with the first ids"


@pytest.mark.parametrize("before", [[2], [2, 2], [4, 1], [5, 1]])
def test_a_prompt_computed_again_is_not_scored_again(before: list[int]) -> None:
    """The recomputation after preemption: from position 0, with generated tokens as part of the prompt."""
    pool = pool_of()
    request = add(pool, prompt=[5, 6, 7, 8, 9], prompt_logprobs=0, max_tokens=4)
    for n, count in enumerate(before):
        score(pool, request, n, count)
    done = len(request.prompt_logprobs)
    request.num_computed = 0
    assert bool(score(pool, request, 8, request.num_tokens)) == (done < 4)
    [update] = pool.deliver(lambda _: True, 3.0)
    assert update.prompt_logprobs == tuple(score_of(n) for n in (1, 2, 3, 4))


def test_a_prompt_of_one_id_has_no_scores() -> None:
    pool = pool_of()
    request = add(pool, prompt=[5], prompt_logprobs=3)
    assert score(pool, request, 0, 1) == []
    [update] = pool.deliver(lambda _: True, 3.0)
    assert update.prompt_logprobs == ()


def test_sets_are_computed_only_for_sampling_members() -> None:
    pool = pool_of()
    free = add(pool, "a", prompt=[1, 2, 3])
    bound = add(pool, "b", prompt=[1, 2, 3], allowed_token_ids=(4, 5))
    chunk = make_plan(0, Selection([Choice(bound, 2)]), pool, now=2.0)
    assert not chunk.is_constrained
    pool.record(chunk, StepResult(0, [MemberResult()]))
    plan = make_plan(1, Selection([Choice(free, 3), Choice(bound, 1)]), pool, now=2.0)
    assert [member.is_constrained for member in plan.members] == [False, True]
    assert pool.allowed(plan) == [1 << 4 | 1 << 5]


def test_check_integrity_sees_a_lost_row() -> None:
    pool = pool_of()
    request = add(pool)
    run_once(pool, request, 4)
    pool.check_integrity()
    request.row, request.num_computed = None, 0
    with pytest.raises(AssertionError, match="runs without a row"):
        pool.check_integrity()
