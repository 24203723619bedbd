"""First come, first served."""

from orca_jax.sched.orderings.base import ArrivalQueue, Ordering


class FirstComeFirstServed(Ordering):
    """The order of arrival, as in the paper; a preempted request keeps its place. No request is ever overtaken."""

    def queue(self) -> ArrivalQueue:
        """The requests as the pool has them."""
        return ArrivalQueue()
