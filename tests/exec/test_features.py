"""Every sampling feature through the executor: correct, without compilation, and without effect on other rows."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orca_jax.exec.executor import JaxExecutor
from orca_jax.values.request import TokenLogprobs
from orca_jax.values.step import Member, RowSampling, StepPlan, StepResult
from tests.exec.test_executor import GREEDY, MODEL, PROMPT, make_executor, narrow_executor, plan
from tests.sampling import row_sampling

WITH_LOGPROBS = row_sampling(logprobs=20, num_prompt=len(PROMPT))
pytestmark = pytest.mark.usefixtures("compiled_once")
EVERYTHING = (1 << MODEL.vocab_size) - 1


@pytest.fixture(scope="module")
def executor(program_cache: str, compiled_once: None) -> Iterator[JaxExecutor]:
    executor = narrow_executor(program_cache)
    yield executor
    executor.close()


def first_of(
    row: int, sampling: RowSampling, ids: Sequence[int] = PROMPT, **settings: object
) -> Member:
    """The member of a request's first iteration, in pages of its row."""
    pages = range(row * 8, row * 8 + 8)
    return Member(
        "r", row, 0, ids, is_sampling=True, new_blocks=(pages,), sampling=sampling
    )._replace(**settings)


def next_of(row: int, start: int, token: int, **settings: object) -> Member:
    return Member("r", row, start, [token], is_sampling=True, num_old_blocks=8)._replace(**settings)


def run(executor: JaxExecutor, step: StepPlan, *allowed: int) -> StepResult:
    handle = executor.submit(step)
    if step.is_constrained:
        executor.constrain(handle, allowed)
    return executor.collect(handle)


def reported_tokens(
    executor: JaxExecutor, sampling: RowSampling, count: int, row: int = 0
) -> tuple[list[int], list[TokenLogprobs]]:
    """The tokens of a request running alone, and the log probabilities of each."""
    tokens: list[int] = []
    reported: list[TokenLogprobs] = []
    member = first_of(row, sampling)
    for _ in range(count):
        result = run(executor, plan(member))
        tokens += result.token_ids
        reported += [member.logprobs for member in result.members if member.logprobs is not None]
        member = next_of(row, len(PROMPT) + len(tokens) - 1, tokens[-1])
    return tokens, reported


def test_greedy_tokens_are_the_most_probable_reported_ones(executor: JaxExecutor) -> None:
    tokens, reported = reported_tokens(executor, WITH_LOGPROBS, 4)
    assert tokens == [entry.top_ids[0] for entry in reported]
    assert all(entry.rank == 1 and entry.logprob == entry.top_logprobs[0] for entry in reported)
    assert all(
        list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True) for entry in reported
    )
    plain, nothing = reported_tokens(executor, GREEDY, 4)
    assert (plain, nothing) == (tokens, [])


@pytest.mark.parametrize("count", [0, 1, 7])
def test_as_many_are_reported_as_requested(executor: JaxExecutor, count: int) -> None:
    _, [reported] = reported_tokens(
        executor, row_sampling(logprobs=count, num_prompt=len(PROMPT)), 1
    )
    assert (len(reported.top_ids), len(reported.top_logprobs)) == (count, count)


def test_penalties_count_generated_tokens_of_earlier_iterations(executor: JaxExecutor) -> None:
    """Each token is the best of the twenty reported, after the penalties of the tokens generated before.

    A constant added to all logits does not change the effect of frequency and presence, so log probabilities serve as
    logits. With at most nine generated tokens, the best of all is among twenty.
    """
    tokens, reported = reported_tokens(
        executor,
        row_sampling(
            logprobs=20, num_prompt=len(PROMPT), presence_penalty=0.3, frequency_penalty=0.2
        ),
        9,
    )
    for position, (token, entry) in enumerate(zip(tokens, reported, strict=True)):
        before = tokens[:position]
        changed = [
            logprob - 0.2 * before.count(other) - 0.3 * (other in before)
            for other, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        assert token == entry.top_ids[int(np.argmax(changed))]
    assert tokens != reported_tokens(executor, WITH_LOGPROBS, 9)[0], "the penalties did something"


def test_a_preempted_request_is_penalised_as_before(executor: JaxExecutor) -> None:
    """Its generated tokens are processed again like a prompt, in another row, and still count as generated."""
    sampling = row_sampling(
        logprobs=20, num_prompt=len(PROMPT), presence_penalty=0.5, repetition_penalty=1.2
    )
    tokens, _ = reported_tokens(executor, sampling, 6)
    again = run(executor, plan(first_of(2, sampling, [*PROMPT, *tokens[:5]])))
    assert again.token_ids == tokens[5:]


def test_a_new_holder_does_not_inherit_its_rows_history(executor: JaxExecutor) -> None:
    sampling = row_sampling(repetition_penalty=50.0, num_prompt=2)
    alone = run(executor, plan(first_of(3, sampling, [7, 8]))).token_ids
    reported_tokens(executor, GREEDY, 6, row=1)
    assert run(executor, plan(first_of(1, sampling, [7, 8]))).token_ids == alone


def test_penalties_see_a_token_that_is_still_on_the_device(executor: JaxExecutor) -> None:
    sampling = row_sampling(frequency_penalty=2.0, num_prompt=len(PROMPT))
    expected, _ = reported_tokens(executor, sampling, 4)
    handles = [executor.submit(plan(first_of(1, sampling)))]
    for start in (5, 6, 7):
        ahead = Member("r", 1, start, [], is_sampling=True, last_on_device=True, num_old_blocks=8)
        handles.append(executor.submit(plan(ahead)))
    assert [executor.collect(handle).token_ids[0] for handle in handles] == expected


def test_a_constrained_member_draws_an_allowed_id_and_the_others_as_before(
    executor: JaxExecutor,
) -> None:
    free, [reported] = reported_tokens(executor, WITH_LOGPROBS, 1)
    second, third = reported.top_ids[1:3]
    both = plan(first_of(0, GREEDY, is_constrained=True), first_of(1, GREEDY))
    assert run(executor, both, (1 << second) | (1 << third)).token_ids == [second, free[0]]
    after = plan(
        Member(
            "r",
            0,
            5,
            [],
            is_sampling=True,
            last_on_device=True,
            num_old_blocks=8,
            is_constrained=True,
        ),
        next_of(1, 5, free[0]),
    )
    known = plan(next_of(0, 5, second, is_constrained=True), next_of(1, 5, free[0]))
    assert run(executor, after, EVERYTHING).token_ids == run(executor, known, EVERYTHING).token_ids


def test_sets_go_to_constrained_members_in_the_plans_order_over_several_launches(
    executor: JaxExecutor,
) -> None:
    """27 tokens are more than one launch of 8, and the increment comes first on the device."""
    run(executor, plan(first_of(0, GREEDY)))
    step = plan(
        first_of(1, GREEDY, list(range(10)), is_constrained=True),
        next_of(0, 5, 9, is_constrained=True),
        first_of(2, GREEDY, list(range(40, 49))),
        first_of(3, GREEDY, list(range(60, 67)), is_constrained=True),
    )
    free = run(executor, plan(first_of(2, GREEDY, list(range(40, 49))))).token_ids
    assert run(executor, step, 1 << 100, 1 << 200, 1 << 299).token_ids == [100, 200, *free, 299]


def test_the_order_of_submit_constrain_and_collect_is_checked(executor: JaxExecutor) -> None:
    handle = executor.submit(plan(first_of(0, GREEDY, is_constrained=True)))
    with pytest.raises(AssertionError, match="without a call of `constrain`"):
        executor.collect(handle)
    with pytest.raises(AssertionError, match="empty"):
        executor.constrain(handle, [0])
    with pytest.raises(ValueError, match="longer"):
        executor.constrain(handle, [1, 1])
    executor.constrain(handle, [1 << 5])
    with pytest.raises(AssertionError, match="already"):
        executor.constrain(handle, [1 << 5])
    assert executor.collect(handle).token_ids == [5]


IDS = [*PROMPT, 11, 12, 13, 14, 15, 16, 17, 18]


def scored(
    executor: JaxExecutor, cuts: Sequence[int], row: int = 0, **mates: Member
) -> list[TokenLogprobs]:
    """The scores of `IDS` from the second on, with its tokens in chunks ending at `cuts`."""
    ends, out = [*cuts, len(IDS)], []
    for start, end in zip([0, *cuts], ends, strict=True):
        last = end == len(IDS)
        member = Member(
            "s",
            row,
            start,
            IDS[start:end],
            is_sampling=last,
            num_old_blocks=0 if start == 0 else 8,
            new_blocks=(range(row * 8, row * 8 + 8) if start == 0 else (),),
            sampling=GREEDY if start == 0 else None,
            targets=IDS[start + 1 : end + 1],
            num_top_targets=2,
        )
        result = run(executor, plan(member, *mates.values()))
        # only the last token has no target
        out += [entry for each in result.members for entry in each.scores]
        assert len(result.token_ids) == last + sum(mate.is_sampling for mate in mates.values())
    return out


def step_by_step(executor: JaxExecutor) -> list[TokenLogprobs]:
    """The same scores by generation: a mask forces each next id, one iteration each."""
    out = []
    member = first_of(3, row_sampling(logprobs=2), IDS[:1], is_constrained=True)
    for position, token in enumerate(IDS[1:], start=1):
        result = run(executor, plan(member), 1 << token)
        assert result.token_ids == [token]
        out += [each.logprobs for each in result.members if each.logprobs is not None]
        member = next_of(3, position, token, is_constrained=True)
    return out


def check_close(ours: Sequence[TokenLogprobs], theirs: Sequence[TokenLogprobs]) -> None:
    assert [(entry.rank, entry.top_ids) for entry in ours] == [
        (entry.rank, entry.top_ids) for entry in theirs
    ]
    np.testing.assert_allclose(
        [entry.logprob for entry in ours], [entry.logprob for entry in theirs], atol=1e-5
    )
    np.testing.assert_allclose(
        [e.top_logprobs for e in ours], [e.top_logprobs for e in theirs], atol=1e-5
    )


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(1, len(IDS) - 1), max_size=4))
def test_scores_are_those_of_generation_however_the_prompt_is_cut(
    executor: JaxExecutor, cuts: set[int]
) -> None:
    check_close(scored(executor, sorted(cuts)), step_by_step(executor))


@pytest.mark.usefixtures("few_programs", "quick_compiles", "compiled_when_used")
@pytest.mark.parametrize(
    ("devices", "buckets"),
    [
        (1, (1, 4)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, (100,)), (4, (4, 8)))),
    ],
)
def test_scores_depend_on_neither_buckets_nor_devices(
    executor: JaxExecutor,
    devices: int,
    buckets: tuple[int, ...],
    program_cache: str,
) -> None:
    other = make_executor(program_cache, devices, buckets)
    check_close(scored(other, [5]), scored(executor, []))
    check_close(step_by_step(other), scored(executor, []))
    other.close()


def test_scoring_changes_neither_draws_nor_other_members(executor: JaxExecutor) -> None:
    alone = (
        run(executor, plan(first_of(0, GREEDY, IDS))).token_ids
        + run(executor, plan(first_of(1, GREEDY))).token_ids
    )
    both = plan(first_of(0, GREEDY, IDS, targets=IDS[1:]), first_of(1, GREEDY))
    result = run(executor, both)
    assert result.token_ids == alone
    assert len([each for each in result.members if each.scores]) == 1
    check_close(scored(executor, [], mate=first_of(1, GREEDY)), scored(executor, []))


FEATURES: dict[str, RowSampling] = {
    "nothing": GREEDY,
    "temperature": row_sampling(temperature=0.8),
    "top_k": row_sampling(temperature=0.8, top_k=280),
    "top_p": row_sampling(temperature=0.8, top_p=0.9),
    "min_p": row_sampling(temperature=0.8, min_p=0.1),
    "presence": row_sampling(presence_penalty=1.0),
    "frequency": row_sampling(frequency_penalty=1.0),
    "repetition": row_sampling(repetition_penalty=1.3),
    "bias": row_sampling(logit_bias={5: 100.0}),
    "logprobs": row_sampling(logprobs=5),
}


@pytest.mark.usefixtures("few_programs", "quick_compiles")
def test_no_feature_compiles_anything_while_serving(program_cache: str) -> None:
    """A strict executor raises at the first compilation: with few rows and many, alone and beside a plain row."""
    executor = make_executor(program_cache, buckets=(100,), strict=True)
    for sampling in FEATURES.values():
        run(executor, plan(first_of(0, sampling)))
        run(executor, plan(next_of(0, 5, 9), first_of(1, GREEDY, [1, 2])))
    run(executor, plan(first_of(0, GREEDY, is_constrained=True), first_of(1, GREEDY)), 1 << 7)
    run(executor, plan(first_of(0, GREEDY, IDS, targets=IDS[1:]), first_of(1, GREEDY)))
    run(executor, plan(first_of(0, GREEDY, IDS[:4], targets=IDS[1:5], is_sampling=False)))
    assert executor.stats.compiles_while_serving == 0
    executor.close()


def test_a_request_without_features_gets_the_same_tokens_beside_others_with_them(
    executor: JaxExecutor,
) -> None:
    free = row_sampling(temperature=1.0, seed=7)
    alone = [
        run(executor, plan(first_of(0, free))).token_ids[0],
        run(executor, plan(first_of(1, GREEDY))).token_ids[0],
    ]
    for name, sampling in FEATURES.items():
        mixed = plan(first_of(2, sampling), first_of(0, free), first_of(1, GREEDY))
        assert run(executor, mixed).token_ids[1:] == alone, name
