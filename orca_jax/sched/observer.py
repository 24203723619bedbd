"""Hooks of an engine's turns."""

from collections.abc import Sequence

from orca_jax.sched.pool import RequestPool
from orca_jax.sched.request import Request
from orca_jax.sched.scheduler import Held
from orca_jax.values.request import RequestUpdate
from orca_jax.values.step import ExecutorStats, StepPlan, StepResult


class Observer:
    """Receives every event of an engine, in order, and changes nothing. This one ignores all of them."""

    def arrived(self, request: Request) -> None:
        """A request is in the queue."""

    def selecting(self) -> None:
        """The engine calls its scheduler now; the selection may be empty."""

    def preempted(self, request: Request) -> None:
        """A request has lost its row and its pages to the next iteration."""

    def overruled(self) -> None:
        """The engine has changed the decision of a policy from outside, for the sake of progress."""

    def planned(self, held: Held | None) -> None:
        """The next iteration is decided and goes to the executor now; `held` is as in `Selection`."""

    def submitted(self, plan: StepPlan, pool: RequestPool, stats: ExecutorStats) -> None:
        """The executor has the plan. The device is busy, so slow work of an observer belongs here."""

    def collected(self, plan: StepPlan, result: StepResult) -> None:
        """The oldest submitted iteration has returned."""

    def flush(self) -> None:
        """The engine ends: keep what is left."""

    def delivered(self, updates: Sequence[RequestUpdate]) -> None:
        """The turn is over: updates are delivered, and the iteration collected in it is recorded."""


class Observers(Observer):
    """Passes every event to several observers, in their order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def arrived(self, request: Request) -> None:
        for each in self._observers:
            each.arrived(request)

    def selecting(self) -> None:
        for each in self._observers:
            each.selecting()

    def preempted(self, request: Request) -> None:
        for each in self._observers:
            each.preempted(request)

    def overruled(self) -> None:
        for each in self._observers:
            each.overruled()

    def planned(self, held: Held | None) -> None:
        for each in self._observers:
            each.planned(held)

    def submitted(self, plan: StepPlan, pool: RequestPool, stats: ExecutorStats) -> None:
        for each in self._observers:
            each.submitted(plan, pool, stats)

    def collected(self, plan: StepPlan, result: StepResult) -> None:
        for each in self._observers:
            each.collected(plan, result)

    def flush(self) -> None:
        for each in self._observers:
            each.flush()

    def delivered(self, updates: Sequence[RequestUpdate]) -> None:
        for each in self._observers:
            each.delivered(updates)
