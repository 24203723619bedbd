"""Costs by hand: stages, features, and steps of one dispatch."""

from collections.abc import Mapping, Sequence

import pytest

from lab.paper.gpt import StageCost
from lab.simulated.cost import FeatureCost, features
from orca_jax.sim.cost import LinearCost, WorkCounts, windows_of, work_of
from orca_jax.sim.executor import SimExecutor, VirtualClock
from orca_jax.values.cache_spec import ONE_GROUP, LayerGroup, PageShape
from orca_jax.values.request import SamplingParams
from orca_jax.values.step import Member, RowSampling, StepPlan

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
    assert slow.stages(work, 1) == [2 * 18 + 3], (
        "the control plane does not belong to the engine's kernels"
    )


def test_padding_and_launches() -> None:
    work = work_of([(0, 11, False)]).padded((4, 8))
    assert (work.launches, work.padding) == (2, 1), "8 tokens, and 3 in a bucket of 4"
    assert LinearCost(1.0, 0.5, 0.0).stages(work, 2) == [(1 + 0.5 * 12) / 2] * 2


@pytest.mark.parametrize(("draws", "rows"), [(0, 0), (1, 8), (8, 8), (9, 16), (33, 64)])
def test_samplers_have_sizes(draws: int, rows: int) -> None:
    assert features(WorkCounts(draws=draws))["sampler_rows"] == rows


def test_features_have_weights() -> None:
    cost = FeatureCost({"launches": 2.0, "chunk_pairs": 0.1, "context": 0.01})
    assert (
        cost.stages(work_of(PROMPT + INCREMENTS), 2)
        == [pytest.approx((2 + 0.1 * 10 + 0.01 * 15) / 2)] * 2
    )


def groups_of(*parts: tuple[int, int | None]) -> tuple[LayerGroup, ...]:
    """Groups of so many layers, each with a window."""
    return tuple(
        LayerGroup(tuple(range(layers)), layers, PageShape(1, 1), window)
        for layers, window in parts
    )


MIXED = groups_of((1, None), (2, 4), (1, 4))
"""One layer of four sees all tokens, three see four."""


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        ((0, 6, False), {"chunk_pairs": (21 + 3 * (1 + 2 + 3 + 4 + 4 + 4)) / 4}),
        ((2, 3, False), {"chunk_pairs": (3 + 4 + 5 + 3 * (3 + 4 + 4)) / 4, "chunk_context": 2}),
        (
            (6, 3, False),
            {"chunk_pairs": (7 + 8 + 9 + 3 * 12) / 4, "chunk_context": (6 + 3 * 3) / 4},
        ),
        ((9, 1, True), {"context": (10 + 3 * 4) / 4}),
        ((2, 1, True), {"context": 3}),
    ],
)
def test_a_window_bounds_the_work_of_its_layers(
    member: tuple[int, int, bool], expected: Mapping[str, float]
) -> None:
    found = work_of([member], windows=windows_of(MIXED))._asdict()
    assert {name: found[name] for name in expected} == expected
    assert found["chunk_context"] == expected.get("chunk_context", 0), "nothing else is read"


@pytest.mark.parametrize("groups", [groups_of((3, None)), groups_of((2, 4), (1, 4))])
def test_equal_layers_count_as_one(groups: tuple[LayerGroup, ...]) -> None:
    """Work is counted in integers then, so that sums have no rounding."""
    window = groups[0].window
    work = work_of([(6, 3, False), (9, 1, True)], windows=windows_of(groups))
    assert (work.chunk_pairs, work.context) == ((24, 10) if window is None else (12, 4))
    assert isinstance(work.chunk_pairs, int) and isinstance(work.context, int)


@pytest.mark.parametrize(
    ("groups", "context"), [(ONE_GROUP, 8), (MIXED, (8 + 3 * 4) / 4), (groups_of((1, 4)), 4)]
)
def test_the_simulator_knows_windows(groups: tuple[LayerGroup, ...], context: float) -> None:
    """A prompt of 7 tokens takes 24 s, then an increment 11 s and half a second for each token that it sees."""
    clock = VirtualClock()
    executor = SimExecutor(STAGE, clock, {"0": 2}, groups=groups)
    executor.wait(executor.submit(plan(0, 0, 7)))
    assert clock.now == 10 + 2 * 7
    executor.wait(executor.submit(StepPlan(1, (Member("0", 0, 7, [1], True),))))
    assert clock.now == 24 + 10 + 1 + 0.5 * context


def plan(number: int, row: int, num_prompt: int) -> StepPlan:
    sampling = RowSampling(SamplingParams(max_tokens=1), 0, num_prompt)
    return StepPlan(
        number,
        (
            Member(
                str(row), row, 0, [1] * num_prompt, True, new_blocks=((row,),), sampling=sampling
            ),
        ),
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
    assert ends == [40.0, 52.0, 72.0], (
        "20 + 20; 32 after the first stage, 40 + 12; 52 after it, and 20"
    )
