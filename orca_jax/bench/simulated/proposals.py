"""Proposals of a simulation: the ids have no meaning, and the executor decides about their acceptance."""

from collections.abc import Mapping, Sequence

from orca_jax.sched.drafts.proposer import Chance, Wish
from orca_jax.sched.request import Request
from orca_jax.sim.cost import IterationCost, WorkCounts
from orca_jax.sim.executor import OTHER_ID


class SimProposer:
    """Proposes for every request at any time.

    Args:
        count: ids of a proposal.
        acceptance: that of the executor; the scheduler knows it from the beginning.
    """

    seconds = 0.0

    def __init__(self, count: int, acceptance: float) -> None:
        self._count = count
        self._chance = Chance(1.0, acceptance)

    def chance(self, request: Request) -> Chance:
        """The same for all requests."""
        return self._chance

    def ready(self, request: Request) -> int:
        """All ids of a proposal."""
        return self._count

    def propose(self, wishes: Sequence[Wish]) -> list[Sequence[int]]:
        """The id drawn by requests that go on."""
        return [[OTHER_ID] * wish.number for wish in wishes]

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Does nothing: the chance is known."""


def launch_seconds(cost: IterationCost) -> Mapping[int, float]:
    """Seconds of a launch of each bucket, full of increments without context."""
    return {size: sum(cost.stages(WorkCounts(increments=size, draws=size), 1)) for size in cost.buckets}
