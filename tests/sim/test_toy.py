"""The toy model by hand, and the plans that its executor refuses."""

import time

import pytest

from orca_jax.request import SamplingParams
from orca_jax.sim.toy import ToyExecutor, toy_generate
from orca_jax.step import Member, RowSampling, StepPlan, StepResult

GREEDY = RowSampling(0.0, 0, 1.0, 3)
FIRST = Member("a", row=0, start=0, ids=[1, 2, 3], samples=True, new_pages=[4, 2], sampling=GREEDY)


def toy(**options) -> ToyExecutor:
    return ToyExecutor(vocab_size=10, num_pages=6, page_size=2, num_rows=2, **options)


def run(executor: ToyExecutor, *members: Member) -> StepResult:
    return executor.collect(executor.submit(StepPlan(executor.stats.iterations, members)))


def test_by_hand() -> None:
    """1*2 + 2*3 + 3*4 = 20, 0; + 4*1 = 24, 4; + 5*5 = 49, 9."""
    assert toy_generate([1, 2, 3], SamplingParams(max_tokens=3, temperature=0), vocab_size=10) == [0, 4, 9]
    executor = toy()
    assert run(executor, FIRST).token_ids == [0]
    assert run(executor, Member("a", 0, 3, [0], True, num_old_pages=2)).token_ids == [4]
    assert run(executor, Member("a", 0, 4, [4], True, num_old_pages=2, new_pages=[0])).token_ids == [9]


def test_sampling_by_hand() -> None:
    """20 + seed 3 + 3 tokens + top_k 5 = 31."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_k=5)
    assert toy_generate([1, 2, 3], params, vocab_size=10, seed=3) == [1]
    assert run(toy(), FIRST._replace(sampling=RowSampling(1.0, 5, 1.0, 3))).token_ids == [1]


def test_the_oracle_stops() -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    assert toy_generate([1, 2, 3], params, vocab_size=10, eos_token_ids=[4]) == [0, 4]
    stop_at_0 = SamplingParams(max_tokens=3, temperature=0, stop_token_ids=(0,), ignore_eos=True)
    assert toy_generate([1, 2, 3], stop_at_0, vocab_size=10, eos_token_ids=[4]) == [0]


def test_chunks_and_ids_on_the_device() -> None:
    executor = toy()
    result = run(executor, Member("a", 0, 0, [1], False, new_pages=[4], sampling=GREEDY))
    assert result.token_ids == []
    assert run(executor, Member("a", 0, 1, [2, 3], True, num_old_pages=1, new_pages=[2])).token_ids == [0]
    assert run(executor, Member("a", 0, 3, [], True, last_on_device=True, num_old_pages=2)).token_ids == [4]


def test_going_back_is_computed_again() -> None:
    """A member that repeats its last token, or starts afresh after preemption."""
    executor = toy()
    run(executor, FIRST)
    assert run(executor, Member("a", 0, 2, [3], True, num_old_pages=2)).token_ids == [0]
    assert run(executor, FIRST._replace(new_pages=[1, 3])).token_ids == [0]


def test_several_in_flight_come_back_in_order() -> None:
    executor = toy()
    first = executor.submit(StepPlan(0, (FIRST,)))
    second = executor.submit(StepPlan(1, (FIRST._replace(request_id="b", row=1, new_pages=[0, 1]),)))
    with pytest.raises(AssertionError, match="out of order"):
        executor.collect(second)
    executor = toy()
    first = executor.submit(StepPlan(0, (FIRST,)))
    second = executor.submit(StepPlan(1, (FIRST._replace(request_id="b", row=1, new_pages=[0, 1]),)))
    assert [executor.collect(handle).iteration for handle in (first, second)] == [0, 1]
    assert (executor.stats.iterations, executor.stats.tokens) == (2, 6)
    with pytest.raises(AssertionError, match="nothing is in flight"):
        executor.collect(first)


NEXT = Member("a", 0, 3, [0], True, num_old_pages=2)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "empty"),
        ([NEXT, NEXT], "names a row twice"),
        ([NEXT._replace(ids=[])], "processes nothing"),
        ([NEXT._replace(ids=[10])], "outside the vocabulary"),
        ([NEXT._replace(start=4)], "starts at 4 after 3"),
        ([NEXT._replace(ids=[1, 2])], "5 tokens in 2 pages"),
        ([NEXT._replace(num_old_pages=1)], "has 2 pages, the plan says 1"),
        ([NEXT._replace(request_id="b")], "row 0 is a's, not b's"),
        ([NEXT._replace(sampling=GREEDY)], "new in row 0 and has old pages"),
        ([NEXT._replace(row=2)], "row 2 of 2"),
        ([NEXT, FIRST._replace(request_id="b", row=1, new_pages=[4, 0])], "given to row 1 too"),
        ([FIRST._replace(request_id="b", new_pages=[3, 3])], "another request wrote"),
    ],
)
def test_wrong_plans_are_refused(members: list[Member], message: str) -> None:
    executor = toy()
    run(executor, FIRST)
    with pytest.raises(AssertionError, match=message):
        executor.submit(StepPlan(1, tuple(members)))


def test_a_plan_out_of_turn_is_refused() -> None:
    with pytest.raises(AssertionError, match="iteration 1 where 0 is due"):
        toy().submit(StepPlan(1, (FIRST,)))


def test_override() -> None:
    executor = toy(override=lambda request_id, length, token: {3: 7, 4: None}[length])
    assert run(executor, FIRST) == StepResult(0, [7], [True])
    assert run(executor, Member("a", 0, 3, [7], True, num_old_pages=2)) == StepResult(1, [0], [False])


def test_latency() -> None:
    """Iterations in flight run one after another, and submitting does not wait."""
    executor = toy(latency=0.05)
    start = time.perf_counter()
    handles = [
        executor.submit(StepPlan(0, (FIRST,))),
        executor.submit(StepPlan(1, (FIRST._replace(request_id="b", row=1, new_pages=[0, 1]),))),
    ]
    for handle in handles:
        executor.collect(handle)
    assert time.perf_counter() - start >= 0.1
    assert executor.stats.wait_seconds > 0


def test_close() -> None:
    executor = toy()
    executor.close()
    with pytest.raises(AssertionError, match="after close"):
        executor.submit(StepPlan(0, (FIRST,)))
