"""What an engine tells about its turns to whoever listens."""

from collections.abc import Sequence

from orca_jax.request import Request, RequestUpdate
from orca_jax.sched.pool import RequestPool
from orca_jax.step import ExecutorStats, StepPlan, StepResult


class Observer:
    """Told of everything that happens, in the order in which it does; changes nothing. This one keeps nothing."""

    def arrived(self, request: Request) -> None:
        """A request is in the queue."""

    def selecting(self) -> None:
        """The engine asks its scheduler who runs next; nobody may."""

    def preempted(self, request: Request) -> None:
        """A request has just lost its row and its pages to the iteration that is being planned."""

    def planned(self) -> None:
        """The next iteration is decided, and goes to the executor now."""

    def submitted(self, plan: StepPlan, pool: RequestPool, stats: ExecutorStats) -> None:
        """The executor has it; a device works, so that here is the time to do what takes some."""

    def collected(self, plan: StepPlan, result: StepResult) -> None:
        """The oldest submitted iteration has come back."""

    def delivered(self, updates: Sequence[RequestUpdate]) -> None:
        """The turn is over: updates are handed out, and the iteration that was collected in it is done with."""
