"""The toy model by hand, and the plans refused by its executor."""

import time

import pytest

from orca_jax.sim.toy import ToyExecutor
from orca_jax.sim.toy_logits import toy_logprobs
from orca_jax.sim.toy_memory import toy_span
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import Member, MemberResult, SpannedPrompt, StepPlan, StepResult
from tests.sampling import row_sampling
from tests.sim.oracle import toy_generate

GREEDY = row_sampling(seed=3)
FIRST = Member(
    "a", row=0, start=0, ids=[1, 2, 3], is_sampling=True, new_blocks=([4, 2],), sampling=GREEDY
)


def toy(**options) -> ToyExecutor:
    return ToyExecutor(vocab_size=10, num_blocks=(6,), page_size=2, num_rows=2, **options)


def run(executor: ToyExecutor, *members: Member) -> StepResult:
    return executor.collect(executor.submit(StepPlan(executor.stats.iterations, members)))


def test_by_hand() -> None:
    """1*2 + 2*3 + 3*4 = 20, 0; + 4*1 = 24, 4; + 5*5 = 49, 9."""
    assert toy_generate([1, 2, 3], SamplingParams(max_tokens=3, temperature=0), vocab_size=10) == [
        0,
        4,
        9,
    ]
    executor = toy()
    assert run(executor, FIRST).token_ids == [0]
    assert run(executor, Member("a", 0, 3, [0], True, num_old_blocks=2)).token_ids == [4]
    assert run(
        executor, Member("a", 0, 4, [4], True, num_old_blocks=2, new_blocks=([0],))
    ).token_ids == [9]


def test_vectors_by_hand() -> None:
    """The vectors have the numbers 7, 8 and 9: 1*2 + 2*8 + 3*9 = 45, 5; + 4*10 = 85, + 5*5 = 110, 0."""
    span = toy_span(1, 3, "upload", 7)
    prompt = SpannedPrompt((1, 2, 3, 2, 4), (span,))
    executor = toy()
    first = FIRST._replace(ids=prompt[:3])
    assert run(executor, first).token_ids == [5]
    rest = Member("a", 0, 3, prompt[3:], True, num_old_blocks=2, new_blocks=([0],))
    assert run(executor, rest).token_ids == [0]
    params = SamplingParams(max_tokens=1, temperature=0)
    assert toy_generate(prompt, params, vocab_size=10) == [0]
    wrong = SpannedPrompt((1, 2, 3), (span._replace(length=2, key="upload:8"),))
    with pytest.raises(AssertionError, match="the digest of upload:8 is that of others"):
        run(toy(), FIRST._replace(ids=wrong))


def test_sampling_by_hand() -> None:
    """20 + seed 3 + 3 tokens + top_k 5 = 31."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_k=5)
    assert toy_generate([1, 2, 3], params, vocab_size=10, seed=3) == [1]
    assert run(toy(), FIRST._replace(sampling=row_sampling(1.0, 5, 1.0, 3))).token_ids == [1]


def test_the_oracle_stops() -> None:
    params = SamplingParams(max_tokens=3, temperature=0)
    assert toy_generate([1, 2, 3], params, vocab_size=10, eos_token_ids=[4]) == [0, 4]
    stop_at_0 = SamplingParams(max_tokens=3, temperature=0, stop_token_ids=(0,), ignore_eos=True)
    assert toy_generate([1, 2, 3], stop_at_0, vocab_size=10, eos_token_ids=[4]) == [0]


def test_chunks_and_ids_on_the_device() -> None:
    executor = toy()
    result = run(executor, Member("a", 0, 0, [1], False, new_blocks=([4],), sampling=GREEDY))
    assert result.token_ids == []
    assert run(
        executor, Member("a", 0, 1, [2, 3], True, num_old_blocks=1, new_blocks=([2],))
    ).token_ids == [0]
    assert run(
        executor, Member("a", 0, 3, [], True, last_on_device=True, num_old_blocks=2)
    ).token_ids == [4]


def test_going_back_is_computed_again() -> None:
    """A member may repeat its last token, or start again after preemption."""
    executor = toy()
    run(executor, FIRST)
    assert run(executor, Member("a", 0, 2, [3], True, num_old_blocks=2)).token_ids == [0]
    assert run(executor, FIRST._replace(new_blocks=([1, 3],))).token_ids == [0]


def test_several_in_flight_come_back_in_order() -> None:
    executor = toy()
    first = executor.submit(StepPlan(0, (FIRST,)))
    second = executor.submit(
        StepPlan(1, (FIRST._replace(request_id="b", row=1, new_blocks=([0, 1],)),))
    )
    with pytest.raises(AssertionError, match="out of order"):
        executor.collect(second)
    executor = toy()
    first = executor.submit(StepPlan(0, (FIRST,)))
    second = executor.submit(
        StepPlan(1, (FIRST._replace(request_id="b", row=1, new_blocks=([0, 1],)),))
    )
    assert [executor.collect(handle).iteration for handle in (first, second)] == [0, 1]
    assert (executor.stats.iterations, executor.stats.tokens) == (2, 6)
    with pytest.raises(AssertionError, match="nothing is in flight"):
        executor.collect(first)


NEXT = Member("a", 0, 3, [0], True, num_old_blocks=2)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], "empty"),
        ([NEXT, NEXT], "names a row twice"),
        ([NEXT._replace(ids=[])], "processes nothing"),
        ([NEXT._replace(ids=[10])], "outside the vocabulary"),
        ([NEXT._replace(start=4)], "starts at 4 after 3"),
        ([NEXT._replace(ids=[1, 2])], "position 4 in 2 pages"),
        ([NEXT._replace(num_old_blocks=1)], "has 2 blocks, but the plan has 1"),
        ([NEXT._replace(request_id="b")], "row 0 is a's, not b's"),
        ([NEXT._replace(sampling=GREEDY)], "new in row 0 and has old blocks"),
        ([NEXT._replace(row=2)], "row 2 of 2"),
        ([NEXT, FIRST._replace(request_id="b", row=1, new_blocks=([4, 0],))], "given to row 1 too"),
        ([FIRST._replace(request_id="b", new_blocks=([3, 3],))], "another request wrote"),
    ],
)
def test_wrong_plans_are_refused(members: list[Member], message: str) -> None:
    executor = toy()
    run(executor, FIRST)
    with pytest.raises(AssertionError, match=message):
        executor.submit(StepPlan(1, tuple(members)))


def test_masked_drawing() -> None:
    """20: the favourite is 0. Among 3, 8 and 9 it is 3, and the next id is after 20 + 4*4 = 36."""
    executor = toy()
    handle = executor.submit(StepPlan(0, (FIRST._replace(is_constrained=True),)))
    executor.constrain(handle, [1 << 3 | 1 << 8 | 1 << 9])
    assert executor.collect(handle).token_ids == [3]
    assert run(
        executor, Member("a", 0, 3, [], True, last_on_device=True, num_old_blocks=2)
    ).token_ids == [6]


def test_only_constrained_members_have_sets() -> None:
    executor = toy()
    other = FIRST._replace(request_id="b", row=1, new_blocks=([0, 1],), is_constrained=True)
    handle = executor.submit(StepPlan(0, (FIRST, other)))
    executor.constrain(handle, [1 << 5])
    assert executor.collect(handle).token_ids == [0, 5]


@pytest.mark.parametrize(
    ("sets", "message"),
    [([], "0 sets for 1"), ([1, 1], "2 sets for 1"), ([0], "empty"), ([1 << 10], "vocabulary")],
)
def test_wrong_sets_are_refused(sets: list[int], message: str) -> None:
    executor = toy()
    handle = executor.submit(StepPlan(0, (FIRST._replace(is_constrained=True),)))
    with pytest.raises(AssertionError, match=message):
        executor.constrain(handle, sets)


def test_sets_out_of_turn_are_refused() -> None:
    executor = toy()
    handle = executor.submit(StepPlan(0, (FIRST._replace(is_constrained=True),)))
    with pytest.raises(AssertionError, match="submit while"):
        executor.submit(StepPlan(1, (NEXT,)))
    with pytest.raises(AssertionError, match="another iteration"):
        executor.constrain(object(), [1])
    executor.constrain(handle, [1])
    with pytest.raises(AssertionError, match="no iteration waits"):
        executor.constrain(handle, [1])
    with pytest.raises(AssertionError, match="does not sample"):
        executor.submit(StepPlan(1, (NEXT._replace(is_sampling=False, is_constrained=True),)))


def test_penalties_count_what_was_generated() -> None:
    """The first three ids are the prompt; 0 and 4 are generated: 9 would be next, 49, and all others are behind."""
    sampling = row_sampling(
        0.0, 0, 1.0, 3, num_prompt=3, frequency_penalty=1.0, logit_bias={0: 1.0, 4: 1.0}
    )
    executor = toy()
    run(executor, FIRST._replace(sampling=sampling))
    assert run(executor, NEXT).token_ids == [4], "-6/8 + 1 - 1 for 0 and 0 + 1 for 4"
    later = Member("a", 0, 4, [4], True, num_old_blocks=2, new_blocks=([0],))
    assert run(executor, later).token_ids == [9], "0 and 4 have lost what they were given"


@pytest.mark.parametrize(("num_prompt", "expected"), [(3, 2), (1, 0)])
def test_penalties_leave_the_prompt_alone(num_prompt: int, expected: int) -> None:
    """2 has -2/8 + 1, ahead of the favourite's 0; if it counts as generated, it loses two."""
    sampling = row_sampling(
        0.0, 0, 1.0, 3, num_prompt=num_prompt, frequency_penalty=2.0, logit_bias={2: 1.0}
    )
    assert run(toy(), FIRST._replace(sampling=sampling)).token_ids == [expected]


def test_logprobs_and_scores() -> None:
    """The next id has its rank in the model's own order: 2 is two behind 0. Scores are those of ids 2 and 3."""
    sampling = row_sampling(0.0, 0, 1.0, 3, logprobs=1, logit_bias={2: 5.0})
    executor = toy()
    result = run(executor, FIRST._replace(sampling=sampling, targets=[2, 3], num_top_targets=2))
    assert result.token_ids == [2]
    assert result.members[0].logprobs == toy_logprobs(0, 2, 1, 10)
    [member] = result.members
    assert [(score.rank, score.top_ids) for score in member.scores] == [(1, (2, 3)), (6, (8, 9))]


def test_sampling_leaves_log_probabilities_alone() -> None:
    sampling = row_sampling(1.0, 0, 1.0, 3, logprobs=0)
    result = run(toy(), FIRST._replace(sampling=sampling))
    assert (result.token_ids, result.members[0].logprobs) == ([6], toy_logprobs(0, 6, 0, 10))


@pytest.mark.parametrize(
    ("targets", "message"),
    [([2], "1 targets for 3"), ([2, 4], "the following ids"), ([2, 3, 11], "3 targets")],
)
def test_wrong_targets_are_refused(targets: list[int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run(toy(), FIRST._replace(targets=targets))


def test_a_plan_out_of_turn_is_refused() -> None:
    with pytest.raises(AssertionError, match="iteration 1 instead of 0"):
        toy().submit(StepPlan(1, (FIRST,)))


def test_override() -> None:
    executor = toy(override=lambda request_id, length, token: {3: 7, 4: None}[length])
    assert run(executor, FIRST) == StepResult(0, [MemberResult((7,))])
    assert run(executor, Member("a", 0, 3, [7], True, num_old_blocks=2)) == StepResult(
        1, [MemberResult((0,), is_finite=False)]
    )


def test_latency() -> None:
    """Iterations in flight run one after another, and submitting does not wait."""
    executor = toy(latency=0.05)
    start = time.perf_counter()
    handles = [
        executor.submit(StepPlan(0, (FIRST,))),
        executor.submit(
            StepPlan(1, (FIRST._replace(request_id="b", row=1, new_blocks=([0, 1],)),))
        ),
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
