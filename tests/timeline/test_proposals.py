"""Proposals in timelines, in their figures, and in replays."""

import dataclasses

import pytest

from orca_jax.sched.drafts.scheduler import SpeculativeScheduler
from orca_jax.sim.cost import ALL_TOKENS, LinearCost
from orca_jax.timeline.measure import Timeline, figures, members, proposals, token_times
from orca_jax.tools.bench.replay import replay
from orca_jax.tools.timeline.fit import work_in
from orca_jax.values.errors import ConfigError
from orca_jax.values.speculation import SpeculativeConfig
from tests.sched.drafts.test_scheduler import LIMITS, Oracle
from tests.timeline.traced import ONE, TracedLab

SPECULATIVE = SpeculativeConfig(num_speculative_tokens=4)
COST = LinearCost(per_iteration=1.0, per_token=0.01, per_pair=0.0)


def recorded(speculative: SpeculativeConfig | None) -> tuple[TracedLab, Timeline]:
    lab = TracedLab(max_bs=2, shape=ONE, speculative=speculative)
    if speculative is not None:
        lab.scheduler.inner = scheduler = SpeculativeScheduler(
            lab.scheduler.inner, Oracle(), LIMITS, {}
        )
        scheduler.is_on = True
    for name in "ABCD":
        lab.add(name, 5, 40)
    lab.run()
    return lab, lab.timeline


def test_a_timeline_has_the_proposals() -> None:
    lab, run = recorded(SPECULATIVE)
    drafts = lab.pool.drafts
    proposed, accepted, tested = proposals(run)
    assert (proposed, accepted) == (drafts.num_draft_tokens, drafts.num_accepted_tokens)
    assert accepted < tested < proposed
    found = figures(run)
    assert (found["proposed_tokens"], found["accepted_tokens"]) == (proposed, accepted)
    assert [len(times) for times in token_times(run).values()] == [40] * 4
    verified = next(iteration for iteration in run.iterations if iteration.proposed)
    assert sum(size for _, _, size in members(verified)) == sum(
        plan_tokens(lab, verified.iteration)
    )
    work = work_in(verified, ALL_TOKENS)
    num_proposed = sum(count for _, count in verified.proposed or ())
    assert work.draws == len(verified.increments) + num_proposed
    assert work.increments + work.chunk_tokens == work.draws


def plan_tokens(lab: TracedLab, number: int) -> list[int]:
    return [member.num_tokens for member in lab.executor.plans[number].members]


def test_a_replay_accepts_as_many() -> None:
    """With proposals there are fewer iterations; with a chance as recorded about as many as in the recording."""
    _, run = recorded(SPECULATIVE)
    again = replay(run, run.head.config, COST)
    without = replay(run, dataclasses.replace(run.head.config, speculative_config=None), COST)
    assert [len(times) for times in token_times(again).values()] == [40] * 4
    _, accepted, tested = proposals(run)
    of_replay = proposals(again)
    assert of_replay[1] / of_replay[2] == pytest.approx(accepted / tested, abs=0.15)
    assert len(again.iterations) < 0.7 * len(without.iterations)
    assert proposals(without) == (0, 0, 0)


def test_a_replay_needs_recorded_proposals() -> None:
    _, run = recorded(None)
    with pytest.raises(ConfigError, match="has no proposals") as raised:
        replay(run, dataclasses.replace(run.head.config, speculative_config=SPECULATIVE), COST)
    assert raised.value.param == "speculative_config"
