"""Simulations with times computed by hand, and what policies see in them."""

import random
from pathlib import Path
from typing import ClassVar

import pytest

from orca_jax.policy import API, Decision, PolicyView, RequestView
from orca_jax.sim.cost import seconds_by
from orca_jax.tools.simulate.run import LinearCost, SimulatedRequest, simulate
from orca_jax.values.errors import ConfigError
from orca_jax.values.request import Urgency
from tests.policy.turns import Turns

SECOND = LinearCost(per_iteration=1.0, per_token=0.0, per_pair=0.0)


class Alphabetical:
    """An order by program; it notes the fields that it sees."""

    api: ClassVar[int] = API
    preempts: ClassVar[bool] = False
    is_static: ClassVar[bool] = True
    seen: ClassVar[dict[int, tuple[object, ...]]] = {}

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        self.seen[job.index] = job.program, job.weight, job.ttft, job.tpot, job.deadline, job.tenant
        return (float(ord(job.program[0])),)


class Priced(Turns):
    """Turns, with the cost of each decision."""

    prices: ClassVar[list[tuple[int, float]]] = []

    def decide(self, view: PolicyView) -> Decision:
        decision = super().decide(view)
        if decision.run:
            self.prices.append((sum(size for _, size in decision.run), view.seconds(decision.run)))
        return decision


class Both(Turns):
    """A policy that is the order of its own batches too."""

    preempts: ClassVar[bool] = False
    is_static: ClassVar[bool] = True

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        raise AssertionError("its decisions count")


def drawn(rng: random.Random) -> list[SimulatedRequest]:
    return [SimulatedRequest(0.3 * n, rng.randint(1, 30), rng.randint(1, 9)) for n in range(12)]


def test_times_of_two_requests() -> None:
    load = [SimulatedRequest(0.0, 4, 3), SimulatedRequest(0.5, 2, 2)]
    one, other = simulate("orca", load, SECOND, max_num_seqs=2).records
    # Iterations end at 1, 2, 3: a prompt; a token and the other prompt; a token of each.
    assert (one.started, one.first_token, one.end) == (0.0, 1.0, 3.0)
    assert (other.started, other.first_token, other.end) == (1.0, 2.0, 3.0)
    assert (other.request, other.arrival, other.prompt, other.output) == (1, 0.5, 2, 2)
    alone = simulate("orca", load, SECOND, max_num_seqs=1)
    assert [record.end for record in alone.records] == [3.0, 5.0]
    assert alone.figures["iterations"] == 5


def test_a_request_may_wait_for_the_end_of_another() -> None:
    load = [
        SimulatedRequest(0.0, 4, 2),
        SimulatedRequest(10.0, 4, 1, after=0),
        SimulatedRequest(3.0, 4, 1),
    ]
    records = simulate("orca", load, SECOND, max_num_seqs=2).records
    assert [(record.request, record.arrival, record.end) for record in records] == [
        (0, 0, 2),
        (2, 3, 4),
        (1, 12, 13),
    ]


def test_equal_arguments_give_equal_runs() -> None:
    cost = LinearCost(0.05, 0.001, 0.0)
    one, same, other = [
        simulate(policy, drawn, cost, seed, max_num_seqs=2).records
        for policy, seed in ((Turns, 3), ("tests.policy.turns:Turns", 3), (Turns, 4))
    ]
    assert one == same != other
    assert len(one) == 12 and all(each.end >= each.first_token > each.started for each in one)


def test_policies_see_the_fields_and_the_cost() -> None:
    urgencies = [
        Urgency(program="b"),
        Urgency(program="a", weight=2.5, ttft=0.5, tpot=0.1, deadline=9.0, tenant="t"),
    ]
    load = [SimulatedRequest(0.0, 3, 2, urgency=urgency) for urgency in urgencies]
    records = simulate(Alphabetical, load, SECOND, max_num_seqs=1, overlap=False).records
    assert [record.end for record in records] == [4.0, 2.0]
    assert Alphabetical.seen == {
        0: ("b", 1.0, None, None, None, ""),
        1: ("a", 2.5, 0.5, 0.1, 9.0, "t"),
    }
    assert [record.program for record in records] == ["b", "a"]
    Priced.prices.clear()
    cost = LinearCost(0.25, 0.5, 0.0, host=1.0)
    simulate(Priced, load, cost, max_num_seqs=2)
    assert Priced.prices[0] == (6, 1.0 + 0.25 + 6 * 0.5)
    assert all(price == 1.25 + 0.5 * tokens for tokens, price in Priced.prices)
    assert seconds_by(cost)([(0, 3, False), (7, 1, True)]) == 1.0 + 0.25 + 4 * 0.5


def test_prompts_with_equal_ids_share_pages() -> None:
    ids = list(range(2, 42))
    load = [
        SimulatedRequest(0.0, ids, 2),
        SimulatedRequest(9.0, [*ids, 7], 2),
        SimulatedRequest(18.0, 40, 2),
    ]
    assert [record.cached for record in simulate("chunked", load, SECOND).records] == [0, 40, 0]


@pytest.mark.parametrize(
    ("policy", "load", "message"),
    [
        ("chunked", [], "a load needs a request"),
        ("chunked", [SimulatedRequest(0.0, 0, 1)], "each of them a token of its prompt"),
        ("chunkd", [SimulatedRequest(0.0, 1, 1)], "did you mean chunked"),
        (
            type("Inner", (Turns,), {}),
            [SimulatedRequest(0.0, 1, 1)],
            "has no class Inner at its top",
        ),
    ],
)
def test_what_cannot_run_is_refused(
    policy: str | type[Turns], load: list[SimulatedRequest], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(policy, load, SECOND)


def test_a_policy_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from tests.policy.turns import Turns\nclass Mine(Turns):\n    pass\n")
    run = simulate(f"{path}:Mine", drawn, SECOND, max_num_seqs=2)
    assert run.timeline.head.config.scheduler.startswith("Mine (sha256:")
    assert len(run.records) == 12


def test_a_policy_with_keys_is_a_policy() -> None:
    run = simulate(Both, [SimulatedRequest(0.0, 4, 2)], SECOND)
    assert (
        run.timeline.head.config.scheduler.startswith("Both (sha256:") and run.records[0].end == 2.0
    )
