"""Order by deadline, the earliest first."""

from orca_jax.sched.orderings.base import KeyOrdering
from orca_jax.sched.request import Request

PATIENCE = 600.0
"""The deadline of a request without one, in seconds after its arrival."""


class EarliestDeadline(KeyOrdering):
    """The earliest deadline first; without one, a request has a deadline `PATIENCE` seconds after its arrival.

    A request is never overtaken by requests arriving after its deadline. So no request waits for ever: neither behind
    urgent requests nor, without a deadline, behind those with one. The order does not drop late requests; the caller
    that set a deadline ends its request then.
    """

    reads = frozenset({"deadline"})

    def key(self, request: Request, now: float) -> tuple[float, ...]:
        """The deadline on the engine's clock."""
        seconds = request.urgency.deadline
        if seconds is None:
            seconds = PATIENCE
        return (request.arrival + seconds,)
