"""Costs by hand: stages, features, and steps of one dispatch."""

from collections.abc import Sequence

import pytest

from orca_jax.request import SamplingParams
from orca_jax.sim.cost import FeatureCost, LinearCost, StageCost, WorkCounts, features, work_of
from orca_jax.sim.executor import SimExecutor, VirtualClock
from orca_jax.step import Member, RowSampling, StepPlan

STAGE = StageCost(weights=10.0, initiation=2.0, increment=1.0, context=0.5)

PROMPT = [(0, 4, False)]
SECOND_CHUNK = [(4, 3, False)]
INCREMENTS = [(4, 1, True), (9, 1, True)]


@pytest.mark.parametrize(
    ("members", "seconds"),
    [
        (PROMPT, 10 + 2 * 4),
        (SECOND_CHUNK, 10 + 2 * 3 + 0.5 * 4),  # it reads the keys and values of four tokens
        (INCREMENTS, 10 + 1 * 2 + 0.5 * (5 + 10)),
        (PROMPT + INCREMENTS, 10 + 2 * 4 + 1 * 2 + 0.5 * (5 + 10)),
    ],
)
def test_the_cost_of_a_stage(members: Sequence[tuple[int, int, bool]], seconds: float) -> None:
    assert STAGE.stages(work_of(members), 3) == [seconds] * 3


def test_another_engine_on_the_same_stage() -> None:
    work = work_of(PROMPT)
    assert STAGE.slower(1.25).stages(work, 1) == [1.25 * 18]
    slow = StageCost(10.0, 2.0, 1.0, 0.5, control=3.0).slower(2.0)
    assert slow.stages(work, 1) == [2 * 18 + 3], "the control plane does not belong to the engine's kernels"


def test_padding_and_launches() -> None:
    work = work_of([(0, 11, False)]).padded((4, 8))
    assert (work.launches, work.padding) == (2, 1), "8 tokens, and 3 in a bucket of 4"
    assert LinearCost(1.0, 0.5, 0.0).stages(work, 2) == [(1 + 0.5 * 12) / 2] * 2


@pytest.mark.parametrize(("draws", "rows"), [(0, 0), (1, 8), (8, 8), (9, 16), (33, 64)])
def test_samplers_have_sizes(draws: int, rows: int) -> None:
    assert features(WorkCounts(draws=draws))["sampler_rows"] == rows


def test_features_have_weights() -> None:
    cost = FeatureCost({"launches": 2.0, "chunk_pairs": 0.1, "context": 0.01})
    assert cost.stages(work_of(PROMPT + INCREMENTS), 2) == [pytest.approx((2 + 0.1 * 10 + 0.01 * 15) / 2)] * 2


def plan(number: int, row: int, num_prompt: int) -> StepPlan:
    sampling = RowSampling(SamplingParams(max_tokens=1), 0, num_prompt)
    return StepPlan(
        number, (Member(str(row), row, 0, [1] * num_prompt, True, new_blocks=((row,),), sampling=sampling),)
    )


def test_each_stage_has_its_own_free_time() -> None:
    """A prompt of 5 tokens takes 20 s on each stage, one of 1 token 12 s: the second stage waits for neither."""
    clock = VirtualClock()
    executor = SimExecutor(STAGE, clock, {"0": 1, "1": 1, "2": 1}, num_stages=2)
    ends = []
    for number, num_prompt in enumerate((5, 1, 5)):
        executor.wait(executor.submit(plan(number, number, num_prompt)))
        ends.append(clock.now)
        clock.now = 0.0
    assert ends == [40.0, 52.0, 72.0], "20 + 20; 32 after the first stage, 40 + 12; 52 after it, and 20"
