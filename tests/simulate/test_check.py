"""Each fault of a policy is found, in one line with a small case; sound policies pass."""

from typing import ClassVar

import pytest

from orca_jax.policy import API, RequestView
from orca_jax.tools.simulate import check
from orca_jax.tools.simulate.check import find_fault
from tests.simulate import broken


class Urgent:
    """A preemptive order by priority."""

    api: ClassVar[int] = API
    preempts: ClassVar[bool] = True
    is_static: ClassVar[bool] = True

    def key(self, job: RequestView, now: float) -> tuple[float, ...]:
        return (job.priority,)


FAULTS = {
    broken.TwiceTheSame: "job 0 is in the decision twice",
    broken.Ended: "job 0 has ended, or was never seen",
    broken.Forgets: "the engine had to overrule it: the decision is empty, nothing is in flight, and job 0 could run",
    broken.Starves: "iterations, and may_starve is False",
    broken.Raises: "decide raised IndexError: tuple index out of range at line",
    broken.Loops: "decide runs for more than 0.2 s",
    broken.TooManyPages: "pages, and",
    broken.OverBudget: "tokens in one iteration, and the limit is",
    broken.EvictsAndRuns: "is run and evicted",
    broken.Empty: "no token in 1000 turns, and not all",
    broken.Silent: "the decision is empty, nothing is in flight, and job 0 could run",
}


@pytest.mark.parametrize("policy", FAULTS)
def test_each_fault_has_its_line(
    policy: type[broken.Sound], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "LOOP_SECONDS", 0.2 if policy is broken.Loops else 60.0)
    found = find_fault(policy, num_cases=48)
    assert FAULTS[policy] in found and "; smallest case: " in found
    assert "\n" not in found and len(found) < 500


@pytest.mark.parametrize("policy", [broken.Sound, Urgent])
def test_a_sound_policy_passes(policy: type[broken.Sound]) -> None:
    assert find_fault(policy, num_cases=60, seed=1) == ""
